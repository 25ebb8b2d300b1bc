"""The losses of reinforcement learning from log-probabilities and from hidden states."""
