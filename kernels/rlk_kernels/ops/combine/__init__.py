"""combine_experts: the weighted sum of the expert rows of a token."""
