"""Which replica takes an invocation."""
