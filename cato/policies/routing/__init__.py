"""Routing: the replica of a call. A new rule: a file here and a name in `policies.registry`."""
