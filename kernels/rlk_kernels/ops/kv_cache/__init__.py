"""kv_cache: new keys and values into a paged cache."""
