"""The ids of a dump, scored again by engines, which splits its mismatch into edges."""
