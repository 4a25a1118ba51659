"""Which model to unload, and in which order to serve those that wait for a load."""
