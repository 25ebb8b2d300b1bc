"""linear_logp: log-probability of a token from the hidden state."""
