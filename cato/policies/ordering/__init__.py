"""In which order a queue is served. A new rule: a file here and a name in `policies.registry`."""
