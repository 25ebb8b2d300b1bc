"""Arithmetic below the operators: error-free splitting, elementary functions, fixed-order sums."""
