"""The length of a chunk of the gated delta rule, which all backends share."""

CHUNK = 64
"""Rows of a chunk, counted from the sequence's first token. It is part of the order of the sums."""
