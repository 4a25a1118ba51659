"""Published experiments. To add one: a file with a `STUDY`, and a name in `cato.lab.registry`."""
