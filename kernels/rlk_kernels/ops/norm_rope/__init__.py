"""norm_rope: the norms of queries and keys, and their rotation, in one launch."""
