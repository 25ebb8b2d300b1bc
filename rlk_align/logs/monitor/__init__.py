"""Monitoring of a training run by step: metrics, trends, limits, and the frameworks' own
metrics."""
