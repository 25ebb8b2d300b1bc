"""Each operator of a side, recomputed in float64 on that side's own recorded inputs."""
