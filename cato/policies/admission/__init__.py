"""May an invocation join what a replica runs? A new rule: a file here, used by a scheduler."""
