"""logp: the log-probability of one token per row of logits."""
