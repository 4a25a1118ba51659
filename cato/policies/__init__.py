"""Named policies, one rule per file; `registry` maps names to them. README.md has the table."""
