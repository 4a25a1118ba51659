"""The live drivers on Ray Serve: ingress, executor, nodes and engine replicas."""
