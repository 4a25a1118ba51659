"""Real parts put together for tests and drills: local pools, faults, engine conformance."""
