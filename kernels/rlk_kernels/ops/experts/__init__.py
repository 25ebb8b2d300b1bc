"""Products by expert: each row of a token times the weight of one of its experts."""
