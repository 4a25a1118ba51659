"""Admission: may an invocation join a replica's batch? A new rule: a file, used by a scheduler."""
