"""Published experiments, one file each. A new one: a file here and a name in `registry`."""
