"""Two traces -> a Comparison: parity, controls, pairing, divergence, metrics."""
