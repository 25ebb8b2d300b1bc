"""From the log-probs of both sides to the kind of their mismatch, without an engine or torch."""
