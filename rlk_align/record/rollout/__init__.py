"""A rollout engine's requests; its live engine: a folder for each."""
