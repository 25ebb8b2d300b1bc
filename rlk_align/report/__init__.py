"""A verdict, for people and for programs. Nothing here imports torch."""
