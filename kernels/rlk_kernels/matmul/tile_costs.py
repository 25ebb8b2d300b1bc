"""Measured numbers of each tile, for `tile_time.py`: by kernels/bench/fit_products.py.

Of NVIDIA H100 80GB HBM3 and NVIDIA H200, 2026-11-23.
"""

from rlk_kernels.matmul.tile import Tile
from rlk_kernels.matmul.tile_time import TileCost

# fmt: off
COSTS = {
    Tile(16, 32, 256, 4, 5):
        TileCost(2.23, 1.27, 1.26, 0.682, 1.25, 0.23, 0.00706),
    Tile(64, 32, 256, 4, 4):
        TileCost(1.76, 1.08, 1.15, 0.75, 1.37, 0.297, 0.0131),
    Tile(64, 64, 128, 4, 6):
        TileCost(2, 1.15, 1.33, 0.695, 1.23, 0.329, 0.0178),
    Tile(64, 64, 128, 4, 5, flatten=True):
        TileCost(2.31, 0.562, 1.48, 0.676, 1.24, 0.325, 0.0178),
    Tile(64, 128, 128, 4, 4):
        TileCost(2.17, 1.24, 2.06, 0.676, 1.32, 0.268, 0.0283),
    Tile(128, 128, 64, 4, 5):
        TileCost(2.35, 1.32, 3.51, 0.685, 1.29, 0.26, 0.0457),
    Tile(128, 128, 64, 8, 4, flatten=True):
        TileCost(2.69, 0.598, 3.75, 0.671, 1.29, 0.275, 0.0457),
    Tile(64, 256, 64, 4, 4):
        TileCost(2.55, 1.37, 3.8, 0.666, 1.25, 0.258, 0.0504),
    Tile(64, 256, 64, 8, 4, flatten=True):
        TileCost(2.75, 0.606, 3.91, 0.672, 1.24, 0.26, 0.0504),
    Tile(256, 128, 64, 8, 4, group=4, subtile=True, flatten=True):
        TileCost(2.7, 0.619, 7, 0.691, 1.32, 0.264, 0.0858),
    Tile(128, 256, 64, 8, 4, group=16, subtile=True, flatten=True, tail=64):
        TileCost(2.7, 0.613, 6.97, 0.688, 1.26, 0.284, 5.17),
    Tile(128, 256, 64, 8, 4, subtile=True, flatten=True, tail=128):
        TileCost(2.71, 0.622, 6.82, 0.685, 1.26, 0.264, 6.56),
    Tile(128, 256, 64, 8, 4, subtile=True, flatten=True, tail=64):
        TileCost(2.7, 0.609, 6.99, 0.689, 1.26, 0.267, 4.65),
    Tile(128, 256, 64, 8, 4, group=16, subtile=True, flatten=True):
        TileCost(2.79, 0.617, 6.84, 0.684, 1.25, 0.254, 0.0858),
    Tile(128, 256, 64, 8, 4, subtile=True, flatten=True):
        TileCost(2.77, 0.618, 6.86, 0.683, 1.26, 0.256, 0.0858),
    Tile(16, 64, 256, 4, 5, swap=True):
        TileCost(2.02, 1.13, 0.816, 0.608, 1.26, 0.254, 0.011),
    Tile(32, 64, 256, 4, 4, swap=True):
        TileCost(1.85, 1.08, 1.1, 0.625, 1.27, 0.277, 0.0131),
    Tile(16, 128, 128, 4, 5, swap=True):
        TileCost(2.54, 1.36, 1.58, 0.658, 1.26, 0.243, 0.0198),
    Tile(32, 128, 128, 4, 5, swap=True):
        TileCost(2.3, 1.27, 1.71, 0.658, 1.28, 0.251, 0.0219),
    Tile(64, 96, 64, 4, 8, warp_specialized=True):
        TileCost(2.44, 0.577, 1.74, 0.699, 1.26, 0.253, 0.0229),
    Tile(64, 104, 64, 4, 8, warp_specialized=True):
        TileCost(2.7, 0.587, 1.81, 0.673, 1.26, 0.256, 0.0243),
    Tile(64, 112, 64, 4, 8, warp_specialized=True):
        TileCost(2.64, 0.586, 1.98, 0.684, 1.26, 0.253, 0.0256),
    Tile(64, 144, 128, 4, 4, warp_specialized=True):
        TileCost(2.67, 0.588, 2.36, 0.675, 1.26, 0.255, 0.031),
    Tile(64, 152, 64, 4, 8, warp_specialized=True):
        TileCost(2.74, 0.591, 2.58, 0.686, 1.26, 0.258, 0.0323),
    Tile(64, 160, 64, 4, 8, warp_specialized=True):
        TileCost(2.68, 0.589, 2.67, 0.684, 1.26, 0.255, 0.0337),
    Tile(64, 168, 64, 4, 7, warp_specialized=True):
        TileCost(2.71, 0.589, 2.79, 0.685, 1.26, 0.256, 0.0351),
    Tile(64, 176, 64, 4, 7, warp_specialized=True):
        TileCost(2.69, 0.589, 2.92, 0.687, 1.26, 0.253, 0.0364),
    Tile(64, 208, 64, 4, 6, warp_specialized=True):
        TileCost(2.64, 0.588, 3.33, 0.684, 1.26, 0.259, 0.042),
    Tile(128, 112, 64, 4, 7, warp_specialized=True):
        TileCost(2.85, 0.598, 3.4, 0.696, 1.26, 0.261, 0.041),
    Tile(64, 224, 64, 4, 6, warp_specialized=True):
        TileCost(2.6, 0.586, 3.46, 0.676, 1.26, 0.256, 0.0448),
    Tile(64, 240, 64, 4, 5, warp_specialized=True):
        TileCost(2.61, 0.586, 3.75, 0.682, 1.26, 0.253, 0.0476),
    Tile(64, 256, 64, 4, 5, warp_specialized=True):
        TileCost(2.66, 0.587, 3.77, 0.668, 1.26, 0.254, 0.0504),
    Tile(192, 96, 64, 4, 6, warp_specialized=True):
        TileCost(2.66, 0.59, 4.24, 0.693, 1.26, 0.26, 0.0514),
    Tile(128, 144, 64, 4, 6, warp_specialized=True):
        TileCost(2.75, 0.595, 4.17, 0.695, 1.26, 0.261, 0.0505),
    Tile(128, 160, 64, 4, 6, warp_specialized=True):
        TileCost(2.69, 0.592, 4.48, 0.69, 1.26, 0.26, 0.0554),
    Tile(128, 176, 64, 4, 5, warp_specialized=True):
        TileCost(2.75, 0.6, 4.94, 0.691, 1.26, 0.263, 0.0604),
    Tile(192, 128, 64, 4, 5, warp_specialized=True):
        TileCost(2.61, 0.587, 5.34, 0.692, 1.26, 0.258, 0.0654),
    Tile(128, 192, 64, 4, 5, warp_specialized=True):
        TileCost(2.71, 0.596, 5.27, 0.691, 1.26, 0.266, 0.0654),
    Tile(128, 208, 64, 4, 5, warp_specialized=True):
        TileCost(2.73, 0.6, 5.87, 0.695, 1.26, 0.264, 0.0705),
    Tile(192, 144, 64, 4, 5, warp_specialized=True):
        TileCost(2.71, 0.597, 6.13, 0.7, 1.26, 0.261, 0.0727),
    Tile(128, 224, 64, 4, 5, warp_specialized=True):
        TileCost(2.71, 0.599, 6.22, 0.692, 1.26, 0.259, 0.0755),
    Tile(192, 160, 64, 4, 5, warp_specialized=True):
        TileCost(2.72, 0.602, 6.66, 0.697, 1.26, 0.263, 0.0802),
    Tile(192, 176, 64, 4, 4, warp_specialized=True):
        TileCost(2.67, 0.601, 7.54, 0.704, 1.26, 0.264, 0.0877),
    Tile(192, 192, 64, 4, 4, warp_specialized=True):
        TileCost(2.64, 0.596, 8.06, 0.702, 1.26, 0.26, 0.0952),
    Tile(8, 64, 128, 4, 8, swap=True, warp_specialized=True):
        TileCost(2.22, 0.564, 0.894, 0.647, 1.3, 0.24, 0.00992),
    Tile(16, 64, 128, 4, 8, swap=True, warp_specialized=True):
        TileCost(2.18, 0.559, 0.931, 0.643, 1.25, 0.242, 0.011),
    Tile(24, 64, 128, 4, 8, swap=True, warp_specialized=True):
        TileCost(2.11, 0.555, 0.997, 0.631, 1.2, 0.25, 0.012),
    Tile(32, 64, 128, 4, 8, swap=True, warp_specialized=True):
        TileCost(2.09, 0.552, 1.02, 0.638, 1.23, 0.255, 0.0131),
    Tile(16, 128, 128, 4, 6, swap=True, warp_specialized=True):
        TileCost(2.58, 0.585, 1.54, 0.68, 1.24, 0.243, 0.0198),
    Tile(40, 64, 128, 4, 8, swap=True, warp_specialized=True):
        TileCost(2.11, 0.55, 1.07, 0.657, 1.22, 0.259, 0.0142),
    Tile(16, 192, 64, 4, 8, swap=True, warp_specialized=True):
        TileCost(2.58, 0.585, 2.3, 0.689, 1.24, 0.243, 0.0288),
    Tile(56, 64, 128, 4, 7, swap=True, warp_specialized=True):
        TileCost(2.21, 0.557, 1.15, 0.688, 1.22, 0.279, 0.0166),
    Tile(64, 64, 128, 4, 7, swap=True, warp_specialized=True):
        TileCost(2.28, 0.567, 1.26, 0.696, 1.24, 0.256, 0.0178),
    Tile(32, 128, 64, 4, 8, swap=True, warp_specialized=True):
        TileCost(2.6, 0.586, 1.79, 0.687, 1.24, 0.246, 0.0219),
    Tile(80, 64, 128, 4, 6, swap=True, warp_specialized=True):
        TileCost(2.38, 0.573, 1.52, 0.695, 1.26, 0.257, 0.0204),
    Tile(88, 64, 128, 4, 5, swap=True, warp_specialized=True):
        TileCost(2.44, 0.578, 1.6, 0.69, 1.26, 0.257, 0.0216),
    Tile(104, 64, 64, 4, 8, swap=True, warp_specialized=True):
        TileCost(2.48, 0.581, 1.93, 0.689, 1.26, 0.257, 0.0243),
    Tile(112, 64, 128, 4, 5, swap=True, warp_specialized=True):
        TileCost(2.58, 0.586, 2.03, 0.683, 1.26, 0.254, 0.0256),
    Tile(128, 64, 128, 4, 4, swap=True, warp_specialized=True):
        TileCost(2.5, 0.582, 2.19, 0.678, 1.26, 0.253, 0.0283),
    Tile(64, 128, 64, 4, 8, swap=True, warp_specialized=True):
        TileCost(2.65, 0.586, 2.23, 0.684, 1.26, 0.254, 0.0283),
    Tile(144, 64, 64, 4, 8, swap=True, warp_specialized=True):
        TileCost(2.57, 0.585, 2.56, 0.695, 1.26, 0.259, 0.031),
    Tile(152, 64, 64, 4, 8, swap=True, warp_specialized=True):
        TileCost(2.57, 0.585, 2.67, 0.696, 1.26, 0.257, 0.0323),
    Tile(80, 128, 128, 4, 4, swap=True, warp_specialized=True):
        TileCost(2.75, 0.592, 2.64, 0.693, 1.26, 0.256, 0.0322),
    Tile(208, 64, 64, 4, 6, swap=True, warp_specialized=True):
        TileCost(2.6, 0.586, 3.28, 0.681, 1.26, 0.259, 0.042),
    Tile(104, 128, 64, 4, 7, swap=True, warp_specialized=True):
        TileCost(2.87, 0.597, 3.15, 0.693, 1.26, 0.259, 0.0387),
    Tile(216, 64, 64, 4, 6, swap=True, warp_specialized=True):
        TileCost(2.59, 0.586, 3.26, 0.67, 1.26, 0.256, 0.0434),
    Tile(72, 192, 64, 4, 6, swap=True, warp_specialized=True):
        TileCost(2.76, 0.594, 3.46, 0.698, 1.26, 0.258, 0.042),
    Tile(120, 128, 64, 4, 7, swap=True, warp_specialized=True):
        TileCost(2.76, 0.593, 3.49, 0.687, 1.26, 0.263, 0.0433),
    Tile(80, 192, 64, 4, 6, swap=True, warp_specialized=True):
        TileCost(2.82, 0.594, 3.6, 0.687, 1.26, 0.261, 0.045),
    Tile(144, 128, 64, 4, 6, swap=True, warp_specialized=True):
        TileCost(2.73, 0.594, 4.14, 0.69, 1.26, 0.265, 0.0505),
    Tile(104, 192, 64, 4, 6, swap=True, warp_specialized=True):
        TileCost(2.71, 0.594, 4.51, 0.693, 1.26, 0.265, 0.0548),
    Tile(160, 128, 64, 4, 6, swap=True, warp_specialized=True):
        TileCost(2.72, 0.598, 4.53, 0.69, 1.26, 0.262, 0.0554),
    Tile(168, 128, 64, 4, 6, swap=True, warp_specialized=True):
        TileCost(2.72, 0.597, 4.74, 0.691, 1.26, 0.262, 0.0579),
    Tile(88, 256, 64, 4, 5, swap=True, warp_specialized=True):
        TileCost(2.77, 0.598, 5.31, 0.702, 1.26, 0.279, 0.0624),
    Tile(184, 128, 64, 4, 5, swap=True, warp_specialized=True):
        TileCost(2.69, 0.596, 5.16, 0.691, 1.26, 0.262, 0.0629),
    Tile(200, 128, 64, 4, 5, swap=True, warp_specialized=True):
        TileCost(2.66, 0.595, 5.67, 0.698, 1.26, 0.258, 0.0679),
    Tile(136, 192, 64, 4, 5, swap=True, warp_specialized=True):
        TileCost(2.7, 0.598, 5.84, 0.701, 1.26, 0.268, 0.0691),
    Tile(208, 128, 64, 4, 5, swap=True, warp_specialized=True):
        TileCost(2.66, 0.596, 5.93, 0.701, 1.26, 0.257, 0.0705),
    Tile(216, 128, 64, 4, 5, swap=True, warp_specialized=True):
        TileCost(2.64, 0.594, 6.23, 0.704, 1.26, 0.257, 0.073),
}
# fmt: on
