"""linear_logp: the log-probability of a token from its hidden state."""
