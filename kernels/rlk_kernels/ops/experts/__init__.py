"""Products by expert: each row of a token by the weight of one of its experts."""
