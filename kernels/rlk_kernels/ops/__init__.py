"""The operators: each has its formula and reduction order, a reference, checks, autograd, and a
portable and a Triton implementation. Modules that need Triton are imported when it is chosen."""
