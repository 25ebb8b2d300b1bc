"""Sampling: a token that depends on its row, its key and its position alone."""
