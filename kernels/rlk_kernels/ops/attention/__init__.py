"""attention and paged_attention."""
