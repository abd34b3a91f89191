"""Shapes of the products that are benchmarked and tuned."""

import dataclasses

SHAPES_24 = [  # M, N, K
    (8192, 8192, 8192),
    (8192, 16384, 2048),
    (2048, 16384, 8192),
    (16384, 2048, 8192),
    (16384, 16384, 4096),
]
SHAPES_VENOM = [(16384, 8192, 2048), (16384, 16384, 4096)]  # T, F, D
SHAPES_FP8 = [(32768, 2048, 8192), (32768, 2560, 18432)]  # T, D, F of llama1b and AFM-4.5B, 8 sequences of 4096
VENOM_GROUPS = (8, 16, 32)
VENOM_BLOCKS = (64, 128, 256)  # v

UNTUNED_FFN_SHAPES = [(12288, 6144, 1536), (8192, 12288, 3072)]


@dataclasses.dataclass(frozen=True)
class Sliced:
    """T tokens in blocks of v, each of one of E experts, which have F / E contiguous neurons each."""

    tokens: int
    dim: int
    neurons: int
    experts: int
    v: int

    @property
    def kept(self) -> int:
        """Neurons of a slice."""
        return self.neurons // self.experts


SLICES = [Sliced(16384, 2048, 8192, experts=4, v=256), Sliced(16384, 4096, 16384, experts=4, v=256)]
