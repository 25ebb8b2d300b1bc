"""A trainer's step, and its live model: a file for each library."""
