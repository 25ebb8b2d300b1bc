"""policy_loss and dpo_loss: losses of log-probabilities."""
