"""Replica scaling of a pool. A new rule: a file here and a name in `registry`."""
