"""Queue orders. A new rule: a file here and a name in `policies.registry`."""
