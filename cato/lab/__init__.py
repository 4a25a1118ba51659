"""Simulated and live studies with their targets, benchmarks, and fault drills."""
