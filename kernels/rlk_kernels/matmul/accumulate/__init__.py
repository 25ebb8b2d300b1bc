"""A product whose contracted dimension comes in several calls."""
