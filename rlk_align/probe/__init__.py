"""The causes of a difference: which unit introduced it, which side is off, and its effect."""
