"""Deployment files: YAML at the edge, the frozen values of `cato.core.topology` inside."""
