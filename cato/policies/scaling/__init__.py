"""How many replicas a pool has."""
