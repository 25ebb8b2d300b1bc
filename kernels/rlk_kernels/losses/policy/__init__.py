"""policy_loss and dpo_loss: losses from log-probabilities."""
