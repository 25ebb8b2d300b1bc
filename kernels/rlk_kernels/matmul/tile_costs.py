"""Measured numbers of each tile, for `tile_time.py`: by kernels/bench/fit_products.py.

Of NVIDIA H100 80GB HBM3 and NVIDIA H200, 2026-11-24.
"""

from rlk_kernels.matmul.tile import Tile
from rlk_kernels.matmul.tile_time import TileCost

# fmt: off
COSTS = {
    Tile(16, 32, 256, 4, 5):
        TileCost(1.61, 2.02, 1.39, 0.366, 1.12, 0.235, 0.00735),
    Tile(64, 64, 128, 4, 6):
        TileCost(1.7, 1.42, 1.41, 0.644, 1.2, 0.276, 0.0186),
    Tile(64, 64, 128, 4, 5, flatten=True):
        TileCost(2.34, 0.614, 1.63, 0.485, 1.15, 0.264, 0.0186),
    Tile(64, 128, 128, 4, 4):
        TileCost(1.61, 1.54, 2.18, 0.588, 1.68, 0.259, 0.0294),
    Tile(128, 128, 64, 8, 5):
        TileCost(1.52, 1.96, 3.7, 0.587, 1.61, 0.252, 0.0476),
    Tile(128, 128, 64, 4, 5):
        TileCost(1.46, 1.85, 3.64, 0.612, 1.55, 0.253, 0.0476),
    Tile(128, 128, 64, 8, 4, flatten=True):
        TileCost(2.27, 0.593, 4.29, 0.477, 1.32, 0.262, 0.0476),
    Tile(64, 256, 64, 4, 4):
        TileCost(1.56, 1.75, 3.94, 0.601, 1.04, 0.259, 0.0524),
    Tile(64, 256, 64, 8, 4, flatten=True):
        TileCost(2.3, 0.857, 4.15, 0.546, 0.8, 0.257, 0.0524),
    Tile(256, 128, 64, 8, 4, group=4, subtile=True, flatten=True):
        TileCost(2.14, 1.26, 7.52, 0.529, 1.42, 0.251, 0.0893),
    Tile(128, 256, 64, 8, 4, group=16, subtile=True, flatten=True, tail=64):
        TileCost(1.77, 0.96, 7.13, 0.579, 1.17, 0.278, 5.53),
    Tile(128, 256, 64, 8, 4, subtile=True, flatten=True, tail=128):
        TileCost(2.6, 1.08, 7.38, 0.518, 1.14, 0.254, 6.28),
    Tile(128, 256, 64, 8, 4, subtile=True, flatten=True, tail=64):
        TileCost(2.1, 0.993, 7.03, 0.605, 1.14, 0.258, 5.25),
    Tile(128, 256, 64, 8, 4, group=16, subtile=True, flatten=True):
        TileCost(2.46, 0.877, 7.66, 0.479, 1.1, 0.251, 0.0893),
    Tile(128, 256, 64, 8, 4, subtile=True, flatten=True):
        TileCost(2.39, 0.921, 7.74, 0.464, 1.18, 0.251, 0.0893),
    Tile(16, 64, 256, 4, 5, swap=True):
        TileCost(1.95, 1.25, 0.838, 0.482, 1.25, 0.246, 0.0114),
    Tile(32, 64, 256, 4, 4, swap=True):
        TileCost(1.93, 0.931, 1.14, 0.606, 1.25, 0.253, 0.0136),
    Tile(16, 128, 128, 4, 5, swap=True):
        TileCost(1.34, 2.3, 1.72, 0.381, 0.991, 0.247, 0.0207),
    Tile(32, 128, 128, 4, 5, swap=True):
        TileCost(1.65, 1.81, 1.83, 0.411, 1.04, 0.252, 0.0228),
    Tile(64, 96, 64, 4, 8, warp_specialized=True):
        TileCost(1.67, 1.16, 1.74, 0.745, 1.13, 0.252, 0.0239),
    Tile(64, 104, 64, 4, 8, warp_specialized=True):
        TileCost(2.13, 1.18, 1.89, 0.625, 1.09, 0.253, 0.0252),
    Tile(64, 112, 64, 4, 8, warp_specialized=True):
        TileCost(1.97, 1.25, 1.92, 0.708, 1.22, 0.249, 0.0266),
    Tile(64, 128, 64, 4, 8, warp_specialized=True):
        TileCost(1.92, 1.22, 1.96, 0.807, 1.14, 0.252, 0.0294),
    Tile(64, 144, 128, 4, 4, warp_specialized=True):
        TileCost(2.29, 1.41, 2.3, 0.685, 1.1, 0.247, 0.0322),
    Tile(64, 176, 64, 4, 7, warp_specialized=True):
        TileCost(2.11, 1.34, 2.99, 0.617, 1.07, 0.248, 0.0379),
    Tile(128, 96, 64, 4, 8, warp_specialized=True):
        TileCost(2.48, 1.19, 2.92, 0.692, 1.19, 0.248, 0.038),
    Tile(64, 224, 64, 4, 6, warp_specialized=True):
        TileCost(1.87, 1.37, 3.54, 0.592, 1.08, 0.254, 0.0466),
    Tile(128, 144, 64, 4, 6, warp_specialized=True):
        TileCost(2.58, 1.48, 4.12, 0.649, 1.17, 0.251, 0.0526),
    Tile(128, 160, 64, 4, 6, warp_specialized=True):
        TileCost(2.22, 1.26, 4.61, 0.607, 1.08, 0.253, 0.0577),
    Tile(192, 112, 64, 4, 5, warp_specialized=True):
        TileCost(2.48, 1.49, 5.03, 0.614, 1.11, 0.25, 0.0607),
    Tile(128, 176, 64, 4, 5, warp_specialized=True):
        TileCost(2.28, 1.46, 5.08, 0.599, 1.14, 0.253, 0.0629),
    Tile(128, 192, 64, 4, 5, warp_specialized=True):
        TileCost(2.21, 1.13, 5.54, 0.577, 1.12, 0.255, 0.0681),
    Tile(192, 144, 64, 4, 5, warp_specialized=True):
        TileCost(2.69, 1.52, 6.3, 0.574, 1.11, 0.243, 0.0757),
    Tile(128, 224, 64, 4, 5, warp_specialized=True):
        TileCost(2.34, 1.14, 6.51, 0.54, 1.13, 0.254, 0.0786),
    Tile(192, 160, 64, 4, 5, warp_specialized=True):
        TileCost(2.37, 1.19, 6.82, 0.586, 1.08, 0.24, 0.0834),
    Tile(192, 176, 64, 4, 4, warp_specialized=True):
        TileCost(2.97, 1.62, 7.53, 0.575, 1.04, 0.256, 0.0913),
    Tile(192, 192, 64, 4, 4, warp_specialized=True):
        TileCost(2.25, 1.22, 8.26, 0.558, 1.16, 0.256, 0.0991),
    Tile(8, 64, 128, 4, 8, swap=True, warp_specialized=True):
        TileCost(1.85, 0.928, 1.03, 0.229, 1.17, 0.237, 0.0103),
    Tile(8, 128, 128, 4, 6, swap=True, warp_specialized=True):
        TileCost(1.81, 1.31, 1.52, 0.468, 1.11, 0.243, 0.0196),
    Tile(24, 64, 128, 4, 8, swap=True, warp_specialized=True):
        TileCost(1.74, 0.941, 1.04, 0.483, 1.14, 0.245, 0.0125),
    Tile(8, 192, 64, 4, 8, swap=True, warp_specialized=True):
        TileCost(1.55, 1.23, 2.14, 0.526, 0.856, 0.249, 0.0289),
    Tile(32, 64, 128, 4, 8, swap=True, warp_specialized=True):
        TileCost(1.82, 0.805, 1.02, 0.697, 1.24, 0.25, 0.0136),
    Tile(16, 128, 128, 4, 6, swap=True, warp_specialized=True):
        TileCost(1.75, 1.15, 1.66, 0.447, 1.04, 0.245, 0.0207),
    Tile(40, 64, 128, 4, 8, swap=True, warp_specialized=True):
        TileCost(1.9, 0.742, 1.01, 0.88, 1.28, 0.252, 0.0148),
    Tile(56, 64, 128, 4, 7, swap=True, warp_specialized=True):
        TileCost(1.77, 0.935, 1.08, 1.09, 1.31, 0.261, 0.0173),
    Tile(64, 64, 128, 4, 7, swap=True, warp_specialized=True):
        TileCost(1.68, 1.07, 1.26, 0.898, 1.27, 0.253, 0.0186),
    Tile(72, 64, 128, 4, 6, swap=True, warp_specialized=True):
        TileCost(1.62, 1.15, 1.43, 0.733, 1.22, 0.251, 0.0199),
    Tile(80, 64, 128, 4, 6, swap=True, warp_specialized=True):
        TileCost(1.7, 1.14, 1.46, 0.835, 1.19, 0.252, 0.0212),
    Tile(88, 64, 128, 4, 5, swap=True, warp_specialized=True):
        TileCost(1.66, 1.16, 1.64, 0.703, 1.36, 0.25, 0.0225),
    Tile(96, 64, 128, 4, 5, swap=True, warp_specialized=True):
        TileCost(1.73, 1.08, 1.6, 0.861, 1.39, 0.259, 0.0239),
    Tile(48, 128, 64, 4, 8, swap=True, warp_specialized=True):
        TileCost(2.12, 1.09, 1.94, 0.593, 1.14, 0.253, 0.0258),
    Tile(112, 64, 64, 4, 8, swap=True, warp_specialized=True):
        TileCost(1.62, 1.19, 1.9, 0.714, 1.16, 0.263, 0.0266),
    Tile(72, 128, 64, 4, 8, swap=True, warp_specialized=True):
        TileCost(2.25, 1.06, 2.18, 0.898, 1.1, 0.252, 0.0314),
    Tile(160, 64, 64, 4, 8, swap=True, warp_specialized=True):
        TileCost(1.73, 1.19, 2.67, 0.67, 1.25, 0.241, 0.0351),
    Tile(80, 128, 64, 4, 8, swap=True, warp_specialized=True):
        TileCost(2.09, 1.31, 2.23, 0.994, 1.07, 0.254, 0.0335),
    Tile(168, 64, 64, 4, 7, swap=True, warp_specialized=True):
        TileCost(1.86, 1.19, 2.64, 0.68, 1.14, 0.252, 0.0365),
    Tile(88, 128, 64, 4, 8, swap=True, warp_specialized=True):
        TileCost(2.17, 1.32, 2.68, 0.756, 1.22, 0.254, 0.0357),
    Tile(184, 64, 64, 4, 7, swap=True, warp_specialized=True):
        TileCost(1.52, 1.08, 3.13, 0.633, 1.17, 0.268, 0.0394),
    Tile(200, 64, 64, 4, 6, swap=True, warp_specialized=True):
        TileCost(1.84, 1.23, 3.03, 0.594, 1.14, 0.258, 0.0422),
    Tile(208, 64, 64, 4, 6, swap=True, warp_specialized=True):
        TileCost(1.84, 1.28, 3.11, 0.595, 1.12, 0.256, 0.0437),
    Tile(104, 128, 64, 4, 7, swap=True, warp_specialized=True):
        TileCost(2.37, 1.39, 2.81, 0.823, 1.2, 0.257, 0.0403),
    Tile(216, 64, 64, 4, 6, swap=True, warp_specialized=True):
        TileCost(1.92, 1.21, 3.18, 0.597, 1.14, 0.276, 0.0451),
    Tile(72, 192, 64, 4, 6, swap=True, warp_specialized=True):
        TileCost(2.3, 1.36, 3.07, 0.856, 1.15, 0.254, 0.0437),
    Tile(112, 128, 64, 4, 7, swap=True, warp_specialized=True):
        TileCost(2.26, 1.27, 3.04, 0.802, 1.17, 0.259, 0.0427),
    Tile(80, 192, 64, 4, 6, swap=True, warp_specialized=True):
        TileCost(2.35, 1.33, 3.43, 0.763, 1.04, 0.256, 0.0468),
    Tile(144, 128, 64, 4, 6, swap=True, warp_specialized=True):
        TileCost(2.49, 1.33, 4, 0.667, 1.13, 0.259, 0.0526),
    Tile(160, 128, 64, 4, 6, swap=True, warp_specialized=True):
        TileCost(2.2, 1.47, 4.58, 0.615, 1.18, 0.264, 0.0577),
    Tile(176, 128, 64, 4, 5, swap=True, warp_specialized=True):
        TileCost(1.9, 1.51, 4.96, 0.627, 1.11, 0.265, 0.0629),
    Tile(88, 256, 64, 4, 5, swap=True, warp_specialized=True):
        TileCost(2.64, 1.85, 5.12, 0.671, 1.15, 0.269, 0.0649),
    Tile(184, 128, 64, 4, 5, swap=True, warp_specialized=True):
        TileCost(1.95, 1.53, 5.34, 0.59, 1.17, 0.264, 0.0655),
    Tile(200, 128, 64, 4, 5, swap=True, warp_specialized=True):
        TileCost(2.05, 1.59, 5.78, 0.595, 1.21, 0.257, 0.0707),
    Tile(136, 192, 64, 4, 5, swap=True, warp_specialized=True):
        TileCost(2.39, 1.9, 5.93, 0.576, 1.14, 0.253, 0.0719),
    Tile(208, 128, 64, 4, 5, swap=True, warp_specialized=True):
        TileCost(2.04, 1.74, 5.92, 0.607, 1.13, 0.253, 0.0734),
    Tile(216, 128, 64, 4, 5, swap=True, warp_specialized=True):
        TileCost(2.04, 1.72, 6.23, 0.583, 1.13, 0.259, 0.076),
    Tile(224, 128, 64, 4, 5, swap=True, warp_specialized=True):
        TileCost(2.12, 1.77, 6.59, 0.538, 1.19, 0.253, 0.0786),
    Tile(152, 192, 64, 4, 5, swap=True, warp_specialized=True):
        TileCost(2.56, 1.99, 6.6, 0.577, 1.15, 0.267, 0.0796),
    Tile(232, 128, 64, 4, 5, swap=True, warp_specialized=True):
        TileCost(2.24, 1.82, 6.67, 0.574, 1.15, 0.268, 0.0813),
    Tile(160, 192, 64, 4, 5, swap=True, warp_specialized=True):
        TileCost(2.42, 2.15, 6.91, 0.577, 1.16, 0.266, 0.0834),
}
# fmt: on
