"""Studies with arms and targets. A new experiment: a file with a `STUDY`, a name in `registry`."""
