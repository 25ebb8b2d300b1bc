"""From the log-probs of both sides to what kind of mismatch they have: no engine and no torch."""
