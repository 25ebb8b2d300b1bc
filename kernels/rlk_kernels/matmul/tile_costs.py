"""Measured numbers of each tile, for `tile_time.py`: by kernels/bench/fit_products.py.

Of NVIDIA H100 80GB HBM3 and NVIDIA H200, 2026-11-22.
"""

from rlk_kernels.matmul.tile import Tile
from rlk_kernels.matmul.tile_time import TileCost

# fmt: off
COSTS = {
    Tile(64, 16, 256, 4, 5):
        TileCost(1.39, 1.19, 0.705, 2, 1.85, 0.264, 0.0237),
    Tile(64, 64, 128, 4, 6):
        TileCost(1.65, 1.29, 1.04, 1.73, 1.5, 0.311, 0.0373),
    Tile(64, 128, 128, 4, 4):
        TileCost(1.89, 1.52, 1.91, 1.15, 1.88, 0.254, 0.058),
    Tile(64, 128, 64, 4, 7, flatten=True):
        TileCost(2.69, 0.671, 2.13, 0.884, 1.36, 0.267, 0.058),
    Tile(128, 128, 64, 8, 5):
        TileCost(2.07, 1.65, 2.86, 1.09, 1.8, 0.27, 0.0896),
    Tile(128, 128, 64, 8, 4, flatten=True):
        TileCost(2.69, 0.624, 3.32, 0.943, 1.64, 0.281, 0.0896),
    Tile(128, 128, 64, 4, 5):
        TileCost(2.01, 1.61, 2.85, 1.09, 1.75, 0.271, 0.0896),
    Tile(64, 256, 64, 8, 4, flatten=True):
        TileCost(2.65, 0.719, 3.27, 1.06, 1.34, 0.26, 0.101),
    Tile(64, 256, 64, 4, 4):
        TileCost(2.1, 1.65, 3.11, 1.08, 1.44, 0.259, 0.101),
    Tile(256, 128, 64, 8, 4, group=4, subtile=True, flatten=True):
        TileCost(2.51, 0.717, 5.79, 1.06, 1.74, 0.279, 0.164),
    Tile(128, 256, 64, 8, 4, group=16, subtile=True, flatten=True, tail=64):
        TileCost(2.12, 0.71, 5.39, 1.12, 1.53, 0.284, 5.34),
    Tile(128, 256, 64, 8, 4, group=16, subtile=True, flatten=True):
        TileCost(2.81, 0.725, 5.69, 1.01, 1.5, 0.26, 0.164),
    Tile(128, 256, 64, 8, 4, subtile=True, flatten=True, tail=128):
        TileCost(2.21, 0.76, 5.3, 1.11, 1.53, 0.271, 6.62),
    Tile(128, 256, 64, 8, 4, subtile=True, flatten=True, tail=64):
        TileCost(2.15, 0.717, 5.4, 1.12, 1.53, 0.288, 5.16),
    Tile(16, 64, 256, 4, 5, swap=True):
        TileCost(1.77, 1.2, 0.799, 0.916, 1.25, 0.248, 0.0237),
    Tile(32, 64, 256, 4, 4, swap=True):
        TileCost(1.65, 1.21, 0.975, 0.957, 1.42, 0.268, 0.028),
    Tile(16, 128, 128, 4, 5, swap=True):
        TileCost(2.2, 1.73, 1.29, 1.02, 1.54, 0.242, 0.0435),
    Tile(32, 128, 128, 4, 5, swap=True):
        TileCost(1.88, 1.54, 1.54, 1.04, 1.62, 0.247, 0.0475),
    Tile(64, 64, 128, 4, 5, n2=32, warp_specialized=True):
        TileCost(1.78, 1.46, 1.54, 1.22, 1.9, 0.252, 0.0488),
    Tile(64, 128, 128, 4, 4, warp_specialized=True):
        TileCost(1.91, 1.54, 1.91, 1.17, 1.87, 0.251, 0.058),
    Tile(128, 64, 64, 4, 8, n2=32, warp_specialized=True):
        TileCost(2, 1.66, 2.55, 1.08, 1.6, 0.265, 0.0784),
    Tile(64, 128, 64, 4, 7, n2=64, warp_specialized=True):
        TileCost(2.04, 1.6, 2.34, 1.07, 1.55, 0.257, 0.0795),
    Tile(128, 128, 64, 4, 5, n2=64, warp_specialized=True):
        TileCost(1.85, 2.11, 4.09, 1.13, 1.58, 0.258, 0.126),
    Tile(192, 128, 64, 4, 5, warp_specialized=True):
        TileCost(1.77, 1.72, 4.24, 1.21, 1.47, 0.251, 0.126),
    Tile(192, 128, 64, 4, 5, n2=32, warp_specialized=True):
        TileCost(1.99, 1.91, 5.51, 1.16, 1.4, 0.244, 0.165),
    Tile(192, 128, 64, 4, 4, n2=64, warp_specialized=True):
        TileCost(2.06, 2.29, 6.15, 1.14, 1.37, 0.253, 0.181),
    Tile(256, 128, 64, 4, 4, n2=32, warp_specialized=True):
        TileCost(1.99, 1.99, 7.36, 1.16, 1.36, 0.272, 0.218),
    Tile(16, 64, 128, 4, 8, swap=True, warp_specialized=True):
        TileCost(1.66, 1.15, 0.832, 0.934, 1.22, 0.242, 0.0237),
    Tile(32, 64, 128, 4, 8, swap=True, warp_specialized=True):
        TileCost(1.74, 1.2, 0.831, 1.09, 1.35, 0.257, 0.028),
    Tile(16, 128, 128, 4, 6, swap=True, warp_specialized=True):
        TileCost(2.15, 1.63, 1.13, 1.03, 1.57, 0.24, 0.0435),
    Tile(32, 128, 128, 4, 5, swap=True, warp_specialized=True):
        TileCost(1.89, 1.48, 1.44, 1.14, 1.54, 0.243, 0.0475),
    Tile(64, 64, 128, 4, 6, n2=8, swap=True, warp_specialized=True):
        TileCost(1.85, 1.5, 1.47, 1.08, 1.84, 0.25, 0.0435),
    Tile(64, 64, 128, 4, 6, n2=16, swap=True, warp_specialized=True):
        TileCost(1.89, 1.55, 1.46, 1.08, 1.95, 0.252, 0.0452),
    Tile(32, 128, 128, 4, 5, n2=16, swap=True, warp_specialized=True):
        TileCost(2.12, 1.66, 1.81, 1.01, 1.54, 0.246, 0.0649),
    Tile(64, 128, 128, 4, 4, n2=8, swap=True, warp_specialized=True):
        TileCost(2.09, 1.67, 2.28, 1.07, 1.56, 0.251, 0.075),
    Tile(64, 192, 64, 4, 6, n2=16, swap=True, warp_specialized=True):
        TileCost(2.13, 1.67, 3.17, 1.04, 1.67, 0.251, 0.109),
    Tile(64, 192, 64, 4, 6, n2=32, swap=True, warp_specialized=True):
        TileCost(2.1, 1.7, 3.49, 1.11, 1.54, 0.257, 0.111),
    Tile(128, 128, 64, 4, 6, n2=32, swap=True, warp_specialized=True):
        TileCost(2.06, 1.71, 3.65, 1.13, 1.43, 0.256, 0.115),
    Tile(64, 256, 64, 4, 5, n2=32, swap=True, warp_specialized=True):
        TileCost(2.05, 1.73, 4.67, 1.08, 1.5, 0.263, 0.145),
    Tile(128, 192, 64, 4, 5, n2=16, swap=True, warp_specialized=True):
        TileCost(2.05, 1.7, 5.16, 1.06, 1.48, 0.255, 0.165),
    Tile(128, 256, 64, 4, 4, n2=16, swap=True, warp_specialized=True):
        TileCost(2.04, 1.88, 6.97, 1.12, 1.46, 0.262, 0.217),
}
# fmt: on
