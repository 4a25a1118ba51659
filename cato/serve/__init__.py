"""Serving on Ray Serve: ingress, executor, workflow nodes and engine replicas."""
