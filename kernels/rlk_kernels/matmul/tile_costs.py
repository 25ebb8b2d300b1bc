"""Measured numbers of each tile, for `tile_time.py`: by kernels/bench/fit_products.py.

Of NVIDIA H100 80GB HBM3 and NVIDIA H200, 2026-11-23.
"""

from rlk_kernels.matmul.tile import Tile
from rlk_kernels.matmul.tile_time import TileCost

# fmt: off
COSTS = {
    Tile(64, 64, 128, 4, 6):
        TileCost(1.27, 1.69, 1.41, 0.632, 1.19, 0.358, 0.018),
    Tile(64, 64, 128, 4, 5, flatten=True):
        TileCost(1.81, 0.919, 1.57, 0.562, 1.2, 0.348, 0.018),
    Tile(64, 128, 128, 4, 4):
        TileCost(1.24, 1.87, 2.25, 0.573, 1.91, 0.266, 0.0284),
    Tile(64, 128, 64, 4, 7, flatten=True):
        TileCost(2.14, 1.11, 2.54, 0.47, 1.28, 0.279, 0.0284),
    Tile(128, 128, 64, 4, 5):
        TileCost(1.34, 2, 3.8, 0.518, 1.59, 0.269, 0.046),
    Tile(64, 256, 64, 4, 4):
        TileCost(1.41, 2.3, 4.13, 0.499, 1.36, 0.264, 0.0507),
    Tile(64, 256, 64, 8, 4, flatten=True):
        TileCost(2.06, 1.06, 4.3, 0.488, 1.29, 0.264, 0.0507),
    Tile(256, 128, 64, 8, 4, group=4, subtile=True, flatten=True):
        TileCost(1.59, 1.23, 7.6, 0.525, 1.66, 0.275, 0.0863),
    Tile(128, 256, 64, 8, 4, group=16, subtile=True, flatten=True):
        TileCost(1.91, 1.13, 7.49, 0.496, 1.39, 0.259, 0.0863),
    Tile(128, 256, 64, 8, 4, subtile=True, flatten=True, tail=128):
        TileCost(1.47, 1.16, 7.33, 0.524, 1.42, 0.276, 6.33),
    Tile(128, 256, 64, 8, 4, subtile=True, flatten=True, tail=64):
        TileCost(1.42, 1.04, 7.48, 0.526, 1.42, 0.286, 4.97),
    Tile(128, 256, 64, 8, 4, subtile=True, flatten=True):
        TileCost(1.92, 1.14, 7.58, 0.485, 1.4, 0.261, 0.0863),
    Tile(16, 64, 256, 4, 5, swap=True):
        TileCost(1.27, 1.73, 0.872, 0.464, 1.22, 0.257, 0.011),
    Tile(32, 64, 256, 4, 4, swap=True):
        TileCost(1.22, 1.55, 1.16, 0.484, 1.25, 0.286, 0.0131),
    Tile(16, 128, 128, 4, 5, swap=True):
        TileCost(1.43, 2.36, 1.7, 0.485, 1.3, 0.247, 0.02),
    Tile(32, 128, 128, 4, 5, swap=True):
        TileCost(1.34, 1.99, 1.89, 0.486, 1.38, 0.255, 0.0221),
    Tile(64, 64, 128, 4, 5, n2=32, warp_specialized=True):
        TileCost(1.27, 1.95, 1.92, 0.558, 1.54, 0.264, 0.0231),
    Tile(64, 64, 128, 4, 5, n2=32, n3=16, warp_specialized=True):
        TileCost(1.34, 2.18, 2.43, 0.484, 1.81, 0.253, 0.0268),
    Tile(64, 128, 128, 4, 4, warp_specialized=True):
        TileCost(1.31, 2.03, 2.28, 0.517, 1.59, 0.269, 0.0284),
    Tile(64, 128, 64, 4, 8, n2=32, warp_specialized=True):
        TileCost(1.35, 2.27, 2.55, 0.582, 1.62, 0.269, 0.0339),
    Tile(64, 128, 64, 4, 7, n2=64, warp_specialized=True):
        TileCost(1.29, 2.37, 2.85, 0.603, 1.63, 0.263, 0.0395),
    Tile(64, 128, 64, 4, 6, n2=64, n3=16, warp_specialized=True):
        TileCost(1.35, 2.2, 3.35, 0.512, 1.53, 0.262, 0.0437),
    Tile(64, 128, 64, 4, 6, n2=64, n3=32, warp_specialized=True):
        TileCost(1.36, 2.31, 3.49, 0.515, 1.54, 0.262, 0.0451),
    Tile(64, 256, 64, 4, 5, warp_specialized=True):
        TileCost(1.34, 2.4, 3.83, 0.532, 1.46, 0.259, 0.0507),
    Tile(128, 128, 64, 4, 6, n2=32, warp_specialized=True):
        TileCost(1.3, 2.38, 4.95, 0.528, 1.41, 0.261, 0.0558),
    Tile(128, 128, 64, 4, 5, n2=64, warp_specialized=True):
        TileCost(1.23, 2.57, 5.47, 0.565, 1.4, 0.256, 0.0659),
    Tile(192, 128, 64, 4, 5, warp_specialized=True):
        TileCost(1.24, 2.37, 5.64, 0.55, 1.41, 0.247, 0.0659),
    Tile(128, 128, 64, 4, 5, n2=64, n3=16, warp_specialized=True):
        TileCost(1.37, 2.45, 6.35, 0.525, 1.4, 0.264, 0.0755),
    Tile(192, 128, 64, 4, 5, n2=16, warp_specialized=True):
        TileCost(1.35, 2.32, 6.92, 0.525, 1.41, 0.265, 0.0803),
    Tile(128, 128, 64, 4, 5, n2=64, n3=32, warp_specialized=True):
        TileCost(1.27, 2.73, 6.81, 0.55, 1.39, 0.254, 0.076),
    Tile(256, 128, 64, 4, 4, warp_specialized=True):
        TileCost(1.25, 2.62, 7.33, 0.566, 1.42, 0.255, 0.0863),
    Tile(192, 128, 64, 4, 4, n2=64, warp_specialized=True):
        TileCost(1.3, 2.67, 8.4, 0.547, 1.42, 0.252, 0.0959),
    Tile(256, 128, 64, 4, 4, n2=16, warp_specialized=True):
        TileCost(1.35, 2.52, 9.37, 0.53, 1.41, 0.261, 0.106),
    Tile(192, 128, 64, 4, 4, n2=64, n3=16, warp_specialized=True):
        TileCost(1.36, 2.5, 9.82, 0.527, 1.42, 0.273, 0.111),
    Tile(256, 128, 64, 4, 4, n2=32, warp_specialized=True):
        TileCost(1.34, 2.67, 9.91, 0.547, 1.4, 0.264, 0.106),
    Tile(16, 64, 128, 4, 8, swap=True, warp_specialized=True):
        TileCost(1.23, 1.76, 0.907, 0.5, 1.16, 0.25, 0.011),
    Tile(32, 64, 128, 4, 8, swap=True, warp_specialized=True):
        TileCost(1.19, 1.84, 0.968, 0.602, 1.29, 0.273, 0.0131),
    Tile(16, 128, 128, 4, 6, swap=True, warp_specialized=True):
        TileCost(1.36, 1.86, 1.45, 0.512, 1.23, 0.25, 0.02),
    Tile(32, 64, 128, 4, 8, n2=8, swap=True, warp_specialized=True):
        TileCost(1.25, 1.91, 1.54, 0.445, 1.16, 0.254, 0.0151),
    Tile(32, 64, 128, 4, 8, n2=16, swap=True, warp_specialized=True):
        TileCost(1.26, 1.91, 1.56, 0.481, 1.21, 0.262, 0.016),
    Tile(32, 128, 128, 4, 5, swap=True, warp_specialized=True):
        TileCost(1.29, 1.81, 1.82, 0.519, 1.33, 0.258, 0.0221),
    Tile(64, 64, 128, 4, 6, n2=8, swap=True, warp_specialized=True):
        TileCost(1.23, 1.92, 1.76, 0.503, 1.46, 0.255, 0.0205),
    Tile(64, 64, 128, 4, 6, n2=16, swap=True, warp_specialized=True):
        TileCost(1.26, 1.99, 1.79, 0.501, 1.66, 0.262, 0.0213),
    Tile(64, 64, 128, 4, 5, n2=16, n3=8, swap=True, warp_specialized=True):
        TileCost(1.27, 2.06, 2.26, 0.5, 1.39, 0.241, 0.0247),
    Tile(64, 64, 128, 4, 5, n2=32, swap=True, warp_specialized=True):
        TileCost(1.24, 1.99, 1.86, 0.566, 1.48, 0.292, 0.0231),
    Tile(64, 128, 128, 4, 4, n2=8, swap=True, warp_specialized=True):
        TileCost(1.4, 2.39, 2.85, 0.511, 1.6, 0.252, 0.035),
    Tile(32, 192, 64, 4, 7, n2=16, swap=True, registers=True, warp_specialized=True):
        TileCost(1.39, 2.37, 3.07, 0.538, 1.33, 0.264, 0.0346),
    Tile(64, 128, 128, 4, 4, n2=16, swap=True, warp_specialized=True):
        TileCost(1.4, 2.44, 2.93, 0.516, 1.47, 0.259, 0.0355),
    Tile(64, 128, 64, 4, 8, n2=32, swap=True, warp_specialized=True):
        TileCost(1.32, 2.36, 3.19, 0.547, 1.38, 0.253, 0.0367),
    Tile(64, 192, 64, 4, 6, n2=8, swap=True, registers=True, warp_specialized=True):
        TileCost(1.37, 2.32, 3.7, 0.534, 1.43, 0.257, 0.0423),
    Tile(64, 192, 64, 4, 6, n2=16, swap=True, warp_specialized=True):
        TileCost(1.35, 2.26, 4.36, 0.501, 1.43, 0.254, 0.0509),
    Tile(128, 128, 64, 4, 6, n2=16, swap=True, warp_specialized=True):
        TileCost(1.34, 2.34, 4.62, 0.524, 1.41, 0.259, 0.0551),
    Tile(64, 192, 64, 4, 6, n2=32, swap=True, warp_specialized=True):
        TileCost(1.34, 2.43, 4.66, 0.535, 1.41, 0.258, 0.0518),
    Tile(128, 128, 64, 4, 6, n2=32, swap=True, warp_specialized=True):
        TileCost(1.32, 2.35, 4.89, 0.544, 1.41, 0.258, 0.0558),
    Tile(64, 256, 64, 4, 5, n2=16, swap=True, warp_specialized=True):
        TileCost(1.36, 2.32, 5.71, 0.523, 1.43, 0.259, 0.0665),
    Tile(64, 256, 64, 4, 5, n2=32, swap=True, warp_specialized=True):
        TileCost(1.36, 2.51, 6.22, 0.524, 1.44, 0.257, 0.0673),
    Tile(128, 128, 64, 4, 5, n2=64, n3=16, swap=True, warp_specialized=True):
        TileCost(1.32, 2.46, 6.4, 0.522, 1.39, 0.264, 0.0755),
    Tile(128, 192, 64, 4, 5, n2=16, swap=True, warp_specialized=True):
        TileCost(1.34, 2.39, 7.09, 0.521, 1.41, 0.253, 0.0803),
    Tile(128, 128, 64, 4, 5, n2=64, n3=32, swap=True, warp_specialized=True):
        TileCost(1.29, 2.57, 6.92, 0.528, 1.42, 0.273, 0.076),
    Tile(128, 192, 64, 4, 5, n2=32, swap=True, warp_specialized=True):
        TileCost(1.27, 2.5, 7.6, 0.541, 1.4, 0.254, 0.0807),
    Tile(128, 256, 64, 4, 4, n2=16, swap=True, warp_specialized=True):
        TileCost(1.35, 2.5, 9.38, 0.535, 1.42, 0.263, 0.106),
    Tile(128, 192, 64, 4, 4, n2=64, n3=16, swap=True, warp_specialized=True):
        TileCost(1.33, 2.73, 9.89, 0.531, 1.42, 0.268, 0.111),
}
# fmt: on
