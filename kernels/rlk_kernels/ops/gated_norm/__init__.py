"""gated_rms_norm: an RMS norm times silu of a gate."""
