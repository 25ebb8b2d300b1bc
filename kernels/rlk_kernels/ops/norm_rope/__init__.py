"""norm_rope: the norm and the rotation of queries and keys in one launch."""
