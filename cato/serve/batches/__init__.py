"""OpenAI-compatible batches: files of requests that run when there is spare capacity."""
