"""What lies behind a difference: who introduced it, which side is off, and does it matter."""
