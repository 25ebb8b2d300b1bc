"""causal_conv1d: a convolution over the rows of a sequence, by feature, with silu."""
