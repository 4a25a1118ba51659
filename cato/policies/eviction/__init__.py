"""Model eviction and loading for shared pools. A new rule: a file here and a name in `registry`."""
