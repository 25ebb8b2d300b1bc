"""What is asked beyond where two engines part: who is off, and how."""
