"""The control plane: Ray actors as thin shells around the pure core."""
