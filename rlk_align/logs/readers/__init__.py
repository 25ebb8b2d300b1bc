"""Readers of frameworks' dumps: a file for each format."""
