"""Two recordings -> two runs, which are compared as captures are."""
