"""Losses of reinforcement learning, from log-probabilities or from hidden states."""
