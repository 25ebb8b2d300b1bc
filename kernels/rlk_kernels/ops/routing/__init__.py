"""Top-k routing: the experts of a token and their weights."""
