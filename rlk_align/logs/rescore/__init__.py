"""Rescoring: engines score the ids of a dump, which splits its mismatch into edges."""
