"""The loss of GRPO, Dr. GRPO, DAPO and PPO from log-probabilities."""
