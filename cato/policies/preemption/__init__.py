"""Which running invocation gives way to a waiting one? A new rule: a file, used by a scheduler."""
