"""How many replicas a pool has. A new rule: a file here and a name in `registry`."""
