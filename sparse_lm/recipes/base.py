"""`Recipe`: how the six matrix products of a squared-ReLU FFN are computed, and how a model enters and leaves that.

T tokens, D model width, F neurons. X [T, D], W1 and W2 both stored neuron-major, [F, D]:

    up           H  = X W1^T     contracts D        grad_hidden  dY  = dO W2^T    contracts D
                 Y  = relu(H)^2                                  dH  = 2 relu(H) dY
    down         O  = Y W2       contracts F        grad_input   dX  = dH W1      contracts F
                                                    grad_up      dW1 = dH^T X     contracts T
                                                    grad_down    dW2 = Y^T dO     contracts T

Each recipe is one file beside this one. It writes out `forward` and `backward`, which `differentiable` makes one
function, `ffn`. 2 relu(H) is 2 sqrt(Y), so only Y is saved of the hidden layer.

The experts of a mixture are FFNs of Fe neurons, one under the other: expert e of E has neurons e Fe to (e + 1) Fe of
W1 and W2 [E Fe, D]. A recipe that computes them writes out `forward_experts` and `backward_experts`, which `mixture`
makes one differentiable function.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from sparse_lm import collectives
from sparse_lm.collectives import ONE_DEVICE, Axes
from sparse_lm.ops import backends
from sparse_lm.ops.activations import SQUARED_RELU, rows_per_neuron
from sparse_lm.ops.checks import check_order, described, random_key
from sparse_lm.ops.formats import HiddenStats
from sparse_lm.recipes import differentiable
from sparse_lm.recipes.differentiable import FfnCall, InSlots, Stats
from sparse_lm.recipes.groups import Groups
from sparse_lm.recipes.weight_forms import WeightForms, dense_forms

PRODUCTS = ("up", "down", "grad_hidden", "grad_input", "grad_up", "grad_down")
PRECISIONS = ("bf16", "fp8")
_NUMBERS = {"int": (numbers.Integral, "an integer"), "float": (numbers.Real, "a number")}

Rule = tuple[str, bool, str]
"""(knob, field of `Shape` or, of a configuration, key; is its value allowed; what is allowed)."""


class Shape(NamedTuple):
    """Sizes that a recipe's knobs must fit."""

    dim: int  # D
    neurons: int  # F, of one device along a mesh's tensor axis
    tokens: int = 0  # T of one call: a microbatch on one device; 0 for any


class NoState(NamedTuple):
    """The state of a recipe that reads nothing besides the weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Base of all recipes. Fields are knobs; a recipe is hashable, and so can be static under `jax.jit`.

    Attributes:
      implementation: "reference", "hopper" or "triton", which must run all sparse operations; None takes the best.
      shards: devices among which neurons are split when the sparse phase is entered (a mesh's tensor axis).
      activation: of the hidden layer, one of `activations.ACTIVATIONS`. With a gate, W1 [2 F, D] has two rows a neuron.
      precision: of the products of `dense` and `act24`: "fp8", or "bf16", the dtype of x, which others always have.
    """

    implementation: str | None = None
    shards: int = 1
    activation: str = SQUARED_RELU
    precision: str = "bf16"

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        if unknown := [product for product in cls.products if product not in PRODUCTS]:
            raise TypeError(f"products of {cls.__name__} must be among {', '.join(PRODUCTS)}, not {', '.join(unknown)}")

    def __post_init__(self):
        for knob in dataclasses.fields(self):
            annotation = getattr(knob.type, "__name__", knob.type)  # a class, or its name
            kind, called = _NUMBERS.get(annotation, (object, ""))
            if not isinstance(value := getattr(self, knob.name), kind):
                raise ValueError(f"{knob.name} = {value!r} of recipe {self.name!r}: must be {called}")
        implementations = *backends.NAMES, None
        for name, allowed in (("precision", PRECISIONS), ("implementation", implementations)):
            if (value := getattr(self, name)) not in allowed:
                names = ", ".join(filter(None, allowed))
                raise ValueError(f"{name} = {value!r} of recipe {self.name!r}: must be one of {names}")

    @property
    def in_fp8(self) -> bool:
        return self.precision == "fp8"

    name: ClassVar[str]
    computes: ClassVar[tuple[str, ...]] = (SQUARED_RELU,)
    """Names the activations of the FFNs that it computes."""
    computes_experts: ClassVar[tuple[str, ...]] = ()
    """Names the activations of a mixture's experts that it computes."""
    products: ClassVar[dict[str, str]] = {}
    """The sparse products, and the sparse operand of each."""
    State: ClassVar[type] = NoState
    """NamedTuple of the arrays that the recipe reads and does not train."""
    neuron_major: ClassVar[tuple[str, ...]] = ()
    """Arrays of the state that have a row for each neuron, and are laid out on a mesh as the weights are."""
    sparse_weights: ClassVar[bool] = False
    """The weights are sparsified, for all layers at once (`prepare`)."""
    takes_order: ClassVar[bool] = False
    """`ffn` takes the tokens in an order that should be random in training."""
    stochastic: ClassVar[bool] = False
    """The backward pass draws random numbers, so that `ffn` needs a key to be differentiated."""
    enter_reads_inputs: ClassVar[bool] = False
    leave_reads_inputs: ClassVar[bool] = False
    refreshes: ClassVar[bool] = False

    def rules(self, shape: Shape) -> Iterator[Rule]:
        """Yields what the knobs must fulfil for FFNs of this shape."""
        yield from ()

    def work(self) -> dict[str, float]:
        """Returns the FLOPs that each product executes, as a share of the dense product's.

        Zeros do not count, nor does what pads blocks or tiles.
        """
        return {product: 0.5 if product in self.products else 1.0 for product in PRODUCTS}

    def init_state(self, w1: Array, w2: Array) -> Any:
        """Returns a state of the right shapes for one FFN, whose weights give theirs; `enter` gives it values."""
        return self.State()

    def enter(
        self, w1: Float[Array, "rows D"], w2: Float[Array, "F D"], x: Float[Array, "*tokens D"] | None = None
    ) -> tuple[Any, Int32[Array, " F"] | None]:
        """Enters the sparse phase.

        Args:
          w1, w2: as in `ffn`.
          x: [..., D], a batch of the FFN's inputs; None will do unless `enter_reads_inputs`.

        Returns:
          state: what `ffn` reads.
          order: int32[F] that the caller must apply to the neurons of w1, of w2 and of their moments: `w[order]`, or
            `routing.sort_neurons(w, order)` of a w1 with a gate. None if neurons stay where they are.

        Raises:
          ValueError: see `check`; or a recipe that reads x has none.
        """
        self.check(w1, w2, x)
        return self.State(), None

    def refresh(self, w1: Array, w2: Array, state: Any, x: Array | None = None) -> tuple[Any, Stats]:
        """Returns the state after some sparse steps, and what changed. Arguments are those of `enter`."""
        return state, {}

    def refit(self, w1: Array, w2: Array, state: Any) -> Any:
        """Returns the state with its scales, which follow from the weights alone, as they now are; all else stays."""
        return state

    def leave(self, w1: Array, w2: Array, state: Any, x: Array | None = None) -> tuple[Array, Array]:
        """Returns the weights that the sparse forward used, so that a dense step goes on where a sparse one stopped.

        A recipe that `leave_reads_inputs` may fit them to a batch x [..., D] of the FFN's inputs, if it is given one.
        """
        return w1, w2

    def adjust_gradients(self, dw1: Array, dw2: Array, w1: Array, w2: Array, state: Any) -> tuple[Array, Array]:
        """Returns the clipped gradients as the optimizer should see them."""
        return dw1, dw2

    def kept_weights(self, w1: Array, w2: Array) -> dict[str, Array]:
        """Returns bool[F, D] of each weight that 2:4 follows step by step: the entries that it keeps now."""
        return {}

    def for_evaluation(self) -> Recipe:
        """Returns the recipe whose forward decides everything about a token from that token alone."""
        return self

    def prepare(self, w1: Array, w2: Array, state: Any, dtype: DTypeLike) -> tuple[WeightForms, WeightForms]:
        """Brings the weights [L, F, D] of all layers to the forms that the products read, once a step.

        The state has a leading axis L, too; `dtype` is that of the FFN's inputs.
        """
        return dense_forms(w1, dtype), dense_forms(w2, dtype)

    def forward(self, x: Array, ffn: FfnCall) -> tuple[Array, Stats, InSlots | Any]:
        """Returns O [T, D] (this device's share along `tensor`), statistics, and what `backward` needs besides x.

        Where it dispatches its tokens, the last is `InSlots`, and `backward` is given them in slots.
        """
        raise NotImplementedError(f"recipe {self.name!r} has no forward")

    def backward(self, x: Array, saved: Any, do: Array, ffn: FfnCall) -> tuple[Array, Array, Array]:
        """Returns dX [T, D], and dW1 and dW2 [F, D] in the dtype of the weights."""
        raise NotImplementedError(f"recipe {self.name!r} has no backward")

    def block_of_experts(self, pairs: int, experts: int) -> int:
        """Returns v, the slots of a block, for so many (token, choice) pairs of a mixture."""
        self._check_activation(self.computes_experts, "experts")
        raise NotImplementedError(f"recipe {self.name!r} has no block_of_experts")

    def forward_experts(self, x: Array, ffn: FfnCall) -> tuple[Array, Stats, Any]:
        """Returns each pair's O [T k, D] of x [Tp, D] in slots, statistics, and what `backward_experts` needs."""
        raise NotImplementedError(f"recipe {self.name!r} has no forward_experts")

    def backward_experts(self, x: Array, saved: Any, do: Array, ffn: FfnCall) -> tuple[Array, Array, Array, Array]:
        """Returns each pair's dX [T k, D]; dW1 and dW2 [E Fe, D]; and f32[Tp], the sum of Y dY over a slot's neurons.

        x and dO are [Tp, D], in slots.
        """
        raise NotImplementedError(f"recipe {self.name!r} has no backward_experts")

    # What every recipe has.

    def check(self, w1: Array, w2: Array, x: Array | None = None) -> None:
        """Refuses, by name, knobs and arrays that no FFN of this recipe has. Every `enter` begins with it.

        Raises:
          ValueError: a knob that does not fit, or a shape or dtype that is not allowed.
        """
        known = dict.fromkeys((*self.computes, *self.computes_experts))
        self._check_activation(tuple(known), "FFNs" if self.computes else "experts")
        self._check_arrays(w1, w2, x)
        neurons, dim = w2.shape
        if self.shards < 1 or neurons % self.shards:
            raise ValueError(f"shards = {self.shards} of recipe {self.name!r}: must divide the {neurons} neurons")
        shape = Shape(dim, neurons // self.shards)
        for name, ok, allowed in self.rules(shape):
            if not ok:
                value = getattr(shape if name in Shape._fields else self, name)
                raise ValueError(f"{name} = {value!r} of recipe {self.name!r}: {allowed}")
        if (self.products and neurons % 4) or (self.sparse_weights and dim % 4):
            raise ValueError(f"w2 {[neurons, dim]}, [F, D], must have multiples of 4 for recipe {self.name!r}")

    def parts(self, axes: Axes) -> int:
        """Counts the parts, of `shards`, in which the neurons of a device are sorted.

        Raises:
          ValueError: `enter` did not sort them for the devices along `tensor`.
        """
        devices = collectives.size(axes.tensor)
        if self.shards % devices:
            raise ValueError(f"shards = {self.shards} of recipe {self.name!r}: must be a multiple of {devices} devices")
        return self.shards // devices

    def ffn(
        self,
        x: Float[Array, "*tokens D"],
        w1: Float[Array, "rows D"],
        w2: Float[Array, "F D"],
        state: Any = None,
        *,
        key: Array | None = None,
        order: Int32[Array, " T"] | None = None,
        weights: tuple[WeightForms, WeightForms] | None = None,
        layer: Array | int = 0,
        axes: Axes = ONE_DEVICE,
    ) -> tuple[Float[Array, "*tokens D"], Stats]:
        """Computes relu(x W1^T)^2 W2, or a gated FFN, by this recipe; differentiable in x, w1, w2 (reverse mode only).

        On a mesh, under `shard_map`, x holds this shard's tokens, which all devices along `tensor` have, and weights
        and state are this device's rows. Tokens are routed within their shard.

        Args:
          x: [..., D]; all leading axes are tokens.
          w1: [F, D] up projection, a neuron a row; [2 F, D] with a gate; any float dtype.
          w2: [F, D] down projection, a neuron a row.
          state: from `enter`; None for a recipe that has none.
          key: random key; differentiating a `stochastic` recipe needs one.
          order: int32[T], a permutation: the order in which tokens, or those of an expert, are taken. Their own by
            default; random in training, so that tokens of one sequence do not choose together.
          weights: `prepare` of the weights of all layers; made here of w1 and w2 by default.
          layer: number of this FFN among them; one that they do not have is refused unless it is a tracer.
          axes: of the mesh.

        Returns:
          o: [..., D] in the dtype of x.
          stats: "activation_sparsity" f32[], share of zeros in Y, of the computed neurons, before selection,
            and 0 with SwiGLU and GEGLU; "kept_energy" f32[], share of the sum of Y^2 that selection keeps;
            "expert_load" f32[E], share of the tokens that each expert has, of a recipe that routes. They pass no
            gradient.

        Raises:
          ValueError: shapes or dtypes do not fit; no state, or one of another type or shape, is given to a recipe that
            has one; when differentiated, no key to one that is stochastic; or the recipe computes experts only.
          TypeError: x, a weight or the order is no array.
          NotImplementedError: `implementation` cannot compute one of the products.
        """
        self._check_activation(self.computes, "FFNs")
        self._check_arrays(w1, w2, x)
        state = self._checked_state(state, w1, w2, axes)
        tokens = x.reshape(-1, x.shape[-1])
        check_order(order, len(tokens))
        tokens, w1, w2, state, order = jax.tree.map(jnp.asarray, (tokens, w1, w2, state, order))  # NumPy's, too
        layer = _checked_layer(layer, weights, w1, w2)
        with jax.named_scope("feed_forward"):
            o, stats = differentiable.ffn(self, axes, tokens, w1, w2, state, random_key(key), order, weights, layer)
        return o.reshape(x.shape), stats

    def mixture(
        self,
        x: Float[Array, "T D"],
        w1: Float[Array, "rows D"],
        w2: Float[Array, "F D"],
        gates: Float[Array, "T k"],
        groups: Groups,
        state: Any = None,
        *,
        key: Array | None = None,
        weights: tuple[WeightForms, WeightForms] | None = None,
        layer: Array | int = 0,
        axes: Axes = ONE_DEVICE,
    ) -> tuple[Float[Array, "T D"], Stats]:
        """Computes the sum over a token's choices of gate x expert by this recipe, differentiable in x, w1, w2, gates.

        Args:
          x: [T, D].
          w1: [E Fe, D] up projections, expert after expert; [2 E Fe, D] with a gate.
          w2: [E Fe, D] down projections.
          gates: [T, k] floats. One of 0, or whose product with dO underflows in the dtype of x, has no gradient.
          groups: the pairs of tokens and the experts that they chose; blocks of `block_of_experts` slots.
          state, key, weights, layer, axes: as in `ffn`. Along `expert`, w1 and w2 are this device's experts, x and
            gates are of this device's tokens, and the groups of all devices'.

        Returns:
          o: [T, D] in the dtype of x.
          stats: "activation_sparsity" and "kept_energy" of `ffn`, of the pairs.

        Raises:
          ValueError: the recipe computes no such experts; x, gates or weights do not fit the groups; and where `ffn`
            does.
          TypeError: groups or an array are something else.
        """
        self._check_activation(self.computes_experts, "experts")
        if not isinstance(groups, Groups):
            raise TypeError(f"groups must be made by `group_by_expert`; got {described(groups)}")
        if groups.axis != (axis := axes.tensor or axes.expert):
            raise ValueError(f"experts grouped along {groups.axis!r} are not split along the mesh's axis {axis!r}")
        self._check_arrays(w1, w2, x)
        _check_groups(x, gates, groups)
        if axes == ONE_DEVICE:
            _check_experts(w2, groups, multiple=4 if self.products else 1)
        state, layer = self._checked_state(state, w1, w2, axes), _checked_layer(layer, weights, w1, w2)
        x, w1, w2, gates, groups, state = jax.tree.map(jnp.asarray, (x, w1, w2, gates, groups, state))
        with jax.named_scope("feed_forward"):
            key, gates = random_key(key), gates.astype(jnp.float32)
            return differentiable.experts(self, axes, x, w1, w2, gates, groups, state, key, weights, layer)

    def _check_activation(self, activations: tuple[str, ...], what: str) -> None:
        """Refuses the activation unless it is one of those with which the recipe computes FFNs, or experts."""
        if self.activation not in activations:
            known = f"{what} with {', '.join(activations)}, not {self.activation}" if activations else f"no {what}"
            raise ValueError(f"recipe {self.name!r} computes {known}")

    def _check_arrays(self, w1: Array, w2: Array, x: Array | None) -> None:
        """Refuses arrays whose shapes do not fit together, or that are not of floats."""
        rows = "F" if (per_neuron := rows_per_neuron(self.activation)) == 1 else f"{per_neuron} F"
        for name, array in (("w1", w1), ("w2", w2), *([("x", x)] if x is not None else [])):
            if not hasattr(array, "dtype"):  # as NNX's parameters have
                raise TypeError(f"{name} must be an array; got {described(array)}")
            if not jnp.issubdtype(array.dtype, jnp.floating):
                raise ValueError(f"{name} is {array.dtype}: must be of a dtype of floats")
        shapes = f"w1 {[*w1.shape]} and w2 {[*w2.shape]}"
        if w2.ndim != 2 or w1.shape != (per_neuron * w2.shape[0], w2.shape[1]):
            raise ValueError(f"{shapes} must be [{rows}, D] and [F, D] with activation {self.activation!r}")
        if x is not None and (x.shape[-1:] != w2.shape[1:] or not x.size):
            raise ValueError(f"x {[*x.shape]} must be [..., D], not empty; {shapes} are [{rows}, D] and [F, D]")

    def check_entered(self, w1: Array, w2: Array, state: Any, x: Array | None = None) -> None:
        """Refuses arrays that do not fit together, or a state that this recipe did not enter with such weights."""
        self._check_arrays(w1, w2, x)
        self._checked_state(state, w1, w2, ONE_DEVICE)

    def _checked_state(self, state: Any, w1: Array, w2: Array, axes: Axes) -> Any:
        """Refuses a state that the recipe did not make, or, on one device, made with other knobs or weights."""
        if self.State is NoState:
            return NoState()
        if not isinstance(state, self.State):
            made = "make one with enter(w1, w2, x)"
            raise ValueError(f"recipe {self.name!r} reads a state: {made}; got {described(state)}")
        if axes == ONE_DEVICE:
            for name, array in jax.eval_shape(self.init_state, w1, w2)._asdict().items():
                if (given := jnp.shape(getattr(state, name))) != array.shape:
                    raise ValueError(
                        f"{name} {[*given]} of the state must be {[*array.shape]} for this recipe and w1 {[*w1.shape]}:"
                        " enter it with the same knobs and weights"
                    )
        return state


def _checked_layer(layer: Array | int, weights: tuple[WeightForms, WeightForms] | None, *of: Array) -> Array:
    """Refuses prepared weights of other shapes than `of`, and the number of a layer that they do not have.

    A number that is a tracer is not looked at.
    """
    for forms, w in zip(weights or (), of, strict=weights is not None):
        if (forms.neurons, forms.dim) != w.shape:
            raise ValueError(f"weights= are of [{forms.neurons}, {forms.dim}], and must be of {[*w.shape]}")
    if weights is not None and not isinstance(layer, jax.core.Tracer) and not 0 <= layer < weights[0].layers:
        raise ValueError(f"layer = {layer} must be in 0..{weights[0].layers - 1}: weights= have these layers")
    return jnp.asarray(layer, jnp.int32)


def _check_groups(x: Array, gates: Array, groups: Groups) -> None:
    """Refuses tokens and gates of a mixture that do not fit its groups."""
    devices = collectives.size(groups.axis)
    if x.ndim != 2 or gates.shape != (x.shape[0], groups.choices) or devices * gates.size != groups.pairs:
        of = f" of {devices} devices" if devices > 1 else ""
        have = f"the groups have k = {groups.choices} and T k = {groups.pairs}{of}"
        raise ValueError(f"x {[*x.shape]} and gates {[*gates.shape]} must be [T, D] and [T, k]: {have}")


def _check_experts(w2: Array, groups: Groups, multiple: int) -> None:
    """Refuses weights that do not fit a mixture's groups on one device, or experts of no `multiple` of neurons."""
    if w2.shape[0] % (multiple * groups.experts):
        allowed = f"the groups have E = {groups.experts}, and Fe must be a multiple of {multiple}"
        raise ValueError(f"w2 {[*w2.shape]} must be [E Fe, D]: {allowed}")


def hidden_stats(seen: HiddenStats, tokens: int, neurons: int) -> Stats:
    """Returns the statistics of a hidden layer of which `neurons` are computed for each of `tokens`."""
    share = seen.nonzeros / float(tokens * neurons)  # padded rows are all zero, or were counted unseen
    return {
        "activation_sparsity": jnp.maximum(1 - share, 0),
        "kept_energy": seen.kept_energy / jnp.maximum(seen.energy, jnp.finfo(jnp.float32).tiny),
    }
