"""In which order and in which batches an engine that runs a batch to its end serves a queue."""
