"""The bodies of all dialects, written and read in one place. Pure."""
