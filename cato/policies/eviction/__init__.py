"""Which model is unloaded or loaded next. A new rule: a file here and a name in `registry`."""
