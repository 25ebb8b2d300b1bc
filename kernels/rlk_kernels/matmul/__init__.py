"""The matrix product: tiles, split accumulation, launches, the tile-invariance self-check."""
