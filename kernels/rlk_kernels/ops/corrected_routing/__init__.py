"""top-k routing by corrected scores of a sigmoid, from the best groups of experts."""
