"""The metadata store: measurements, learnt values, keys and usage, in one database."""
