"""Preemption: which running call yields to a queued one. A new rule: a file for a scheduler."""
