"""The metadata store: measurements, what was learnt, keys and usage, in one database."""
