"""The virtual-time simulator: the same core and policies as the live actors, without engines."""
