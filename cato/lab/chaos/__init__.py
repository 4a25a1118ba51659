"""Fault drills (`cato chaos`): seeded faults under clients that know every expected token."""
