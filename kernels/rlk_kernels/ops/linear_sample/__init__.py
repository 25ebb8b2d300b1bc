"""linear_sample: a token from a hidden state, without all logits in memory."""
