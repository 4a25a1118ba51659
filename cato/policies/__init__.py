"""Named policies, one rule a file; `registry` maps names to them. README.md has the table."""
