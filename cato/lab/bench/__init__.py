"""Benchmarks of CATO itself; `cato bench` runs them."""
