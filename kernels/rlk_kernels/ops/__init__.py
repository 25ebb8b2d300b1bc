"""The operators: each has its formula and reduction order, a reference, checks, autograd, and a
portable and a Triton implementation. What imports Triton is imported where it was chosen."""
