"""attention and paged_attention, over packed sequences."""
