"""Trains the demo model that ships in `cato/demo`."""
