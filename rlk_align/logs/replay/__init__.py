"""Draws the tokens of a recorded request again: what a dump or a capture holds of it, and where the
tokens part."""
