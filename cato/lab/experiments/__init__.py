"""Published experiments, one file each. To add one: a file here and a name in `registry`."""
