"""Log-probs that a framework wrote: the neutral file, and the table of an imported run."""
