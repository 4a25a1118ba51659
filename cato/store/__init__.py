"""The metadata store: what was measured and learnt, kept over restarts in one database."""
