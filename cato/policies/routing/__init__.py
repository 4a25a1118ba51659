"""Which replica takes an invocation. A new rule: a file here and a name in `policies.registry`."""
