"""Who introduced a difference, who passed it on, and what it does to the log-probs."""
