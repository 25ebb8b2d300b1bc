"""The logs of a training run: read, written, explained, scored again by engines, and watched."""
