"""The sum of a token's expert rows by their weights."""
