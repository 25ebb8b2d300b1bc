"""The engines: one folder each, beside what they share. `registry.py` names them."""
