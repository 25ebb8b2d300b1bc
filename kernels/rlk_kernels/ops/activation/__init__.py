"""activation: an activation without a gate."""
