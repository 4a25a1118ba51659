"""Measurements of CATO itself."""
