"""rms_norm, optionally of the sum with a residual."""
