"""Real parts put together for tests: pools in one process, builders, conformance kits."""
