"""Faults planted into real engines: which ones the comparison finds, and whether it finds one in a
healthy pair."""
