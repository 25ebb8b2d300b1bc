"""write_kv_cache: write new keys and values into a paged cache."""
