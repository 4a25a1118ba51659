"""One file a version of the schema, in order."""
