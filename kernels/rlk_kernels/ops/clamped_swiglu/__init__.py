"""clamped_swiglu: swiglu of clamped inputs, with 1 added to up."""
