"""Shapes of the products that are benchmarked and tuned."""

SHAPES_24 = [  # M, N, K
    (8192, 8192, 8192),
    (8192, 16384, 2048),
    (2048, 16384, 8192),
    (16384, 2048, 8192),
    (16384, 16384, 4096),
]
SHAPES_VENOM = [(16384, 8192, 2048), (16384, 16384, 4096)]  # T, F, D
VENOM_GROUPS = (8, 16, 32)
V = 128
