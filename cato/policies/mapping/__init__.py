"""Batch mapping: the order and batches of a queue for engines that run a batch to its end."""
