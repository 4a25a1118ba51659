"""An engine that answers from a script, for tests with real agents."""
