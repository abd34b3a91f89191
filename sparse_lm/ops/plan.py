"""`GemmPlan`: which operand of each of the six FFN products is sparse. Recipes are named plans."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from sparse_lm.ops.columns import CHOICES
from sparse_lm.ops.routing import DISTANCES


class Operand(NamedTuple):
    """The sparse operand of one product and the format that it is brought to."""

    name: str  # a tensor of the six products: W1, W2, Y, dH, dO
    format: str  # "2:4" | "mvue" (2:4, unbiased) | "venom", always along the contracted dimension

    def __str__(self) -> str:
        return f"{self.name} {self.format}"


W1_24, W2_24 = Operand("W1", "2:4"), Operand("W2", "2:4")
Y_24, DH_24 = Operand("Y", "2:4"), Operand("dH", "2:4")
Y_VENOM, DH_VENOM = Operand("Y", "venom"), Operand("dH", "venom")
DH_MVUE, Y_MVUE, DO_MVUE = Operand("dH", "mvue"), Operand("Y", "mvue"), Operand("dO", "mvue")

PRODUCTS: dict[str, tuple[Operand, ...]] = {
    "up": (W1_24,),
    "down": (W2_24, Y_24, Y_VENOM),
    "grad_hidden": (W2_24,),
    "grad_input": (W1_24, DH_24, DH_VENOM),
    "grad_up": (DH_24, DH_MVUE),
    "grad_down": (Y_24, Y_MVUE, DO_MVUE),
}
"""The six products, and the operands that each can take as its sparse one."""

_ALLOWED = {
    "weights": ("full", "soft_threshold", "transposable"),
    "dense_weights": ("masked", "full"),
    "selection": ("magnitude", "cluster_sets", "slices"),
    "columns": CHOICES,
    "distance": DISTANCES,
    "measure": (None, "tokens", "energy"),
}


@dataclasses.dataclass(frozen=True)
class GemmPlan:
    """How the six products of one FFN are computed. With all defaults: dense.

    With T tokens, D model width, F neurons, X[T,D], W1 and W2 [F,D], H = X W1^T, Y = relu(H)^2:

      up           H = X W1^T      contracts D
      down         O = Y W2        contracts F
      grad_hidden  dY = dO W2^T    contracts D
      grad_input   dX = dH W1      contracts F
      grad_up      dW1 = dH^T X    contracts T
      grad_down    dW2 = Y^T dO    contracts T

    Gradients pass straight through every selection of weights, to the dense master weight. An
    activation dropped in the forward passes no gradient.
    """

    up: Operand | None = None
    down: Operand | None = None
    grad_hidden: Operand | None = None
    grad_input: Operand | None = None
    grad_up: Operand | None = None
    grad_down: Operand | None = None

    weights: str = "full"
    """"full", "soft_threshold" (2409.09099) or "transposable" masks (2404.01847)."""
    dense_weights: str = "masked"
    """What a product reads of a sparse weight that is not its sparse operand: "masked" or "full"."""
    shuffle_tokens: bool = False
    """Permute tokens at random, so that neighbours, which fire alike, do not compete in 2:4 along T."""
    dense_features: float = 0.0
    """Share of neurons, the busiest, whose weight gradients stay dense (2503.16672)."""

    # Venom only
    selection: str = "magnitude"
    """"magnitude": of each block's activations. Known before the up product, from each token's
    cluster alone: "cluster_sets" (four of each m neurons, or any runs) and "slices" (contiguous neurons)."""
    v: int = 128
    m: int = 16
    columns: str = "norm"
    """How "magnitude" picks 4 of m columns: "norm" or "exhaustive"."""
    clusters: int = 16
    neuron_run: int = 1
    """"cluster_sets" choose neurons in runs of this many neighbours; 1: one by one, four of each m."""
    slice_parts: int = 1
    """"slices" of a run whose neurons were on so many devices: each has a part of every slice."""
    distance: str = "cosine"
    measure: str | None = None
    """Return sums over each cluster's "tokens", for its centre, or also of all neurons' "energy" there, for its set."""

    def __post_init__(self):
        for name, allowed in _ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} = {getattr(self, name)!r} must be one of {', '.join(map(str, allowed))}")
        for product, operand in self.operands.items():
            if operand not in PRODUCTS[product]:
                names = ", ".join(map(str, PRODUCTS[product]))
                raise ValueError(f"{product}: the sparse operand must be one of {names}; got {operand}")
        sparse_forms = {p.format if p and p.name in ("Y", "dH") else None for p in (self.down, self.grad_input)}
        if len(sparse_forms) > 1:
            raise ValueError(f"down ({self.down}) and grad_input ({self.grad_input}) must share one activation pattern")
        sparse_hidden = self.down in (Y_24, Y_VENOM)
        if (self.grad_down == Y_MVUE) != (sparse_hidden and self.grad_up == DH_MVUE):
            raise ValueError(
                f"one pass over a sparse Y draws {DH_MVUE} and {Y_MVUE}: grad_up ({self.grad_up}) and grad_down "
                f"({self.grad_down}) must be both of these or neither, with down ({self.down})"
            )
        sparse_along_tokens = self.grad_up in (DH_24, DH_MVUE) and self.grad_down in (Y_24, Y_MVUE)
        if self.dense_features and (self.in_runs or not sparse_along_tokens):
            raise ValueError(
                f"dense_features = {self.dense_features} must be 0 but with 2:4 dH and Y in grad_up ({self.grad_up}) "
                f"and grad_down ({self.grad_down}), of neurons that come one by one"
            )
        if self.weights == "full" and {"W1", "W2"} & {p.name for p in self.operands.values()}:
            raise ValueError("weights = 'full' must be 'soft_threshold' or 'transposable' where a weight is sparse")
        if self.weights == "soft_threshold":
            for name, products in (("W1", ("up", "grad_input")), ("W2", ("down", "grad_hidden"))):
                if all(self.operands.get(p) == Operand(name, "2:4") for p in products):
                    raise ValueError(f"{name} is 2:4 along both dimensions: that needs weights = 'transposable'")

    @property
    def operands(self) -> dict[str, Operand]:
        """Sparse products only: product -> sparse operand."""
        return {p: getattr(self, p) for p in PRODUCTS if getattr(self, p) is not None}

    @property
    def venom(self) -> bool:
        return self.down == Y_VENOM

    @property
    def routed(self) -> bool:
        """Tokens are assigned to clusters and their rows permuted."""
        return self.venom and self.v > 1

    @property
    def pattern_known_first(self) -> bool:
        """The kept neurons follow from a token's cluster, before the up product."""
        return self.venom and self.selection != "magnitude"

    @property
    def in_runs(self) -> bool:
        """The kept neurons of a block are runs of neighbours."""
        return self.pattern_known_first and (self.selection == "slices" or self.neuron_run > 1)

    def run_length(self, neurons: int) -> int:
        """How many neighbours at a time a block's kept neurons are, of F: see `formats.SparseVenom`."""
        return 4 * neurons // self.m // self.slice_parts if self.selection == "slices" else self.neuron_run

    @property
    def draws_hidden(self) -> bool:
        """The pass over a sparse hidden layer draws what both weight gradients read of it, unbiased (2203.10991)."""
        return self.grad_down == Y_MVUE

    @property
    def ordered(self) -> bool:
        """The order in which tokens are taken matters, and should be random in training."""
        return self.routed or self.shuffle_tokens

    @property
    def random(self) -> bool:
        """Some product, or the order of the rows, draws random numbers, so that training needs a key."""
        return self.ordered or any(p.format == "mvue" for p in self.operands.values())

    def weight_axis(self, name: str) -> int:
        """Axis of W1 or W2 [F, D] that its groups of four run along: -1 (D) or 0 (F)."""
        along_neurons = self.grad_input == W1_24 if name == "W1" else self.down == W2_24
        return 0 if along_neurons and self.weights == "soft_threshold" else -1

    def sparse_weight(self, name: str) -> bool:
        """Some product reads the sparse form of W1 or W2."""
        return any(p.name == name for p in self.operands.values())

    def for_evaluation(self) -> GemmPlan:
        """The same forward without chance and causal: a block that shared its columns is now one token."""
        v = 1 if self.venom and self.selection == "magnitude" else self.v
        return dataclasses.replace(self, v=v, shuffle_tokens=False)

    def for_measuring(self) -> GemmPlan:
        """A forward with 2:4 W1 and all else dense, and sums over each cluster's tokens among the stats."""
        dense = dict(down=None, grad_hidden=None, grad_input=None, grad_up=None, grad_down=None)
        return dataclasses.replace(self, **dense, measure="energy")

    def relative_work(self) -> dict[str, float]:
        """FLOPs that each product executes on (sparse) tensor cores, as a share of the dense product's."""
        work = {}
        for product in PRODUCTS:
            operand = self.operands.get(product)
            share = 1.0 if operand is None else 0.5
            if operand is not None and product in ("grad_up", "grad_down"):
                share += (1 - share) * self.dense_features
            # The weight gradients' transposes have the rows of all neurons, but for runs.
            of_kept_neurons = {"up": self.pattern_known_first, "grad_up": self.in_runs, "grad_down": self.in_runs}
            if of_kept_neurons.get(product, self.venom):
                share *= 4 / self.m
            work[product] = share
        return work


DENSE = GemmPlan()

RECIPES: dict[str, GemmPlan] = {
    "dense": DENSE,
    # 2404.01847: every product that reads a weight reads it 2:4; gradients made 2:4 without bias.
    "fst": GemmPlan(W1_24, W2_24, W2_24, W1_24, DH_MVUE, DO_MVUE, weights="transposable"),
    # 2409.09099: one grouping a weight, so only the forward reads it sparse.
    "sste": GemmPlan(W1_24, W2_24, None, None, DH_MVUE, DO_MVUE, weights="soft_threshold"),
    # 2503.16672: dense weights, 2:4 activations.
    "act24": GemmPlan(None, Y_24, None, DH_24, DH_24, Y_24, shuffle_tokens=True, dense_features=0.05),
    # 2602.06183: all six.
    "venom": GemmPlan(W1_24, Y_VENOM, W2_24, DH_VENOM, DH_24, Y_24, weights="soft_threshold"),
}
"""Recipes by name. Their knobs are the plan's other fields: `dataclasses.replace(RECIPES["venom"], m=8)`."""
