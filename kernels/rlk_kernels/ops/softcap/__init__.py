"""softcap: c tanh(x / c)."""
