"""Workflow files: loading and checking YAML and Jinja templates into `cato.core.workflow`."""
