"""Judges a Comparison by a contract. Imports neither torch nor traces."""
