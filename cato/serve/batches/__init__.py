"""Batches: files of requests that run when there is room, in OpenAI's form."""
