"""A training run watched step by step: metrics, trends, limits, and the frameworks' own metrics."""
