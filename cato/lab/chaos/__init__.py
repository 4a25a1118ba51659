"""Drills (`cato chaos`): seeded faults, under clients that know every token."""
