"""Studies, simulated and live, with arms and targets; benchmarks and drills."""
