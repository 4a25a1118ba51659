"""Simulated studies. A new one: a file with a `STUDY`, and a name in `cato.lab.registry`."""
