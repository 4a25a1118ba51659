"""In which order a queue is served."""
