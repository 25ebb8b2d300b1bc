"""rms_norm, optionally of a sum with a residual."""
