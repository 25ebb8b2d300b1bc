"""A Comparison held against a contract. Imports neither torch nor traces."""
