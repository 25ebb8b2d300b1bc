"""embedding: rows of a table."""
