"""Benchmarks of CATO itself and of live deployments; `cato bench` runs them."""
