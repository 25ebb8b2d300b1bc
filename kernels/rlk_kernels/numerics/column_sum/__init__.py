"""Sums over rows in fixed blocks."""
