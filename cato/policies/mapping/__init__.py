"""Batch mapping:

order and batches in which an engine that runs each batch to its end serves a queue.
"""
