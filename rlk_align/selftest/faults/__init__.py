"""The catalogue of faults, which needs no torch."""
