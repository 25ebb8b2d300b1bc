"""swiglu: silu(gate) times up."""
