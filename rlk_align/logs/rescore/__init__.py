"""The ids of a dump, scored again by engines: which part of the mismatch is whose."""
