"""rope: rotary position embedding."""
