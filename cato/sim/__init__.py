"""The virtual-time driver: the same core and policies as the live actors, no clock, no engine."""
