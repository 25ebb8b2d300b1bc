"""Losses on the logits of a router."""
