"""norm_add_norm: the norm of a branch, its addition to the stream and the norm of the sum."""
