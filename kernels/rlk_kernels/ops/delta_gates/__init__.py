"""delta_gates: the decay and the step of a gated delta net."""
