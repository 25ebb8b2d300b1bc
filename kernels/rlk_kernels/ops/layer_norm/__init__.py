"""layer_norm: a norm that subtracts the mean."""
