"""Workflow files: YAML and Jinja in, checked `cato.core.workflow` values out."""
