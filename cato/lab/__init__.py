"""Studies: a workload, the arms that are compared on it, and the targets they are held to."""
