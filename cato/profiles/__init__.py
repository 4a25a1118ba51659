"""Measured service times: the files in `profiles/` and the fits that make them."""
