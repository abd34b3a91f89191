"""The specification: each op in plain XLA, on any device. Backends are tested against this.

The public functions are the ops of `sparse_lm.ops` and `sparse_lm.ops.fp8`, which say what arguments and results are.

Products accumulate in float32 and round once. Where a block of rows shares its columns, only those
rows of the other operand are read, so that the work shrinks with the density on a CPU too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import sequential_vmap
from jax.typing import DTypeLike

from sparse_lm.ops import fp8
from sparse_lm.ops.activations import by_turns, gradient, halves, hidden
from sparse_lm.ops.compress import compress_24, condense, pack_24, pad_to_tiles, to_venom
from sparse_lm.ops.cross_entropy import odds_of_logits
from sparse_lm.ops.formats import TILE, HiddenGradients, HiddenStats, Sparse24, SparseVenom, unpack_metadata
from sparse_lm.ops.grouped import group_sizes
from sparse_lm.ops.mvue import sample_two, uniform_of_groups
from sparse_lm.ops.norm import SAVED, rms_norm
from sparse_lm.ops.row_order import RowOrder, combine
from sparse_lm.ops.select import soft_threshold, split_groups, take_two, top_two, venom_columns

_GATHERED_ELEMENTS = 2**20  # gathered rows that exist at one time: what a CPU's caches hold


def unavailable(device: jax.Device) -> None:
    """Returns None: every device that JAX has can run this."""


def sparsify_24(x: Array, method: str, axis: int, *, dtype: DTypeLike, key: Array | None) -> Sparse24:
    members = split_groups(pad_to_tiles(x.astype(jnp.float32)), axis)
    if method == "mvue":
        first, second, members = sample_two(members, uniform_of_groups(key, members[0].shape, axis))
    else:
        first, second = top_two(members)
    return pack_24(members, first, second, axis=axis, shape=x.shape, dtype=dtype)


def soft_threshold_24(w: Array, scale: Array, axis: int, *, dtype: DTypeLike) -> tuple[Sparse24, Array]:
    if axis == -1:  # of each row, padding included
        scale = jnp.repeat(scale, w.shape[0] // scale.shape[0])
        scale = jnp.pad(scale, (0, -w.shape[0] % TILE))[:, None]
    members = split_groups(pad_to_tiles(w.astype(jnp.float32)), axis)
    scaled = [member * scale for member in soft_threshold(members)]
    sparse = pack_24(scaled, *top_two(members), axis=axis, shape=w.shape, dtype=dtype)
    return sparse, sparse.to_dense()


def sparsify_24_tiles(x: Array, mask: Array, *, dtype: DTypeLike) -> tuple[Sparse24, Sparse24]:
    def compress(axis: int) -> Sparse24:
        form = compress_24(x, mask, axis, dtype=dtype)
        too_many = jnp.stack(split_groups(pad_to_tiles(mask), axis)).sum(0) > 2
        too_many = jnp.repeat(too_many.T if axis == 0 else too_many, 2, axis=-1)
        return dataclasses.replace(form, values=jnp.where(too_many, jnp.nan, form.values))

    return compress(-1), compress(0)


def sparsify_venom(x: Array, v: int, m: int, *, dtype: DTypeLike) -> SparseVenom:
    kept = venom_columns(x, v, m)
    condensed = sparsify_24(condense(x, kept, v), "magnitude", -1, dtype=dtype, key=None)
    return to_venom(condensed, kept, x.shape[1], v, m)


def squared_relu_24(h: Array, *, factor: Array | None = None) -> tuple[Sparse24, HiddenStats]:
    y = _squared_relu(h if factor is None else h * factor)
    sparse = sparsify_24(y, "magnitude", -1, dtype=h.dtype, key=None)
    return sparse, _stats(y, sparse.values)


def squared_relu_venom(h: Array, v: int, m: int) -> tuple[SparseVenom, HiddenStats]:
    y = _squared_relu(h)
    sparse = sparsify_venom(y, v, m, dtype=h.dtype)
    return sparse, _stats(y, sparse.values)


def squared_relu_gradients(
    dy: Array, y: Sparse24 | SparseVenom, *, key: Array | None = None, factor: Array | None = None
) -> HiddenGradients:
    rows, kept = y.values.shape
    dy = dy if factor is None else dy * factor
    padded = jnp.pad(dy.astype(jnp.float32), ((0, rows - dy.shape[0]), (0, 2 * kept - dy.shape[1])))
    pairs = take_two(split_groups(padded), *unpack_metadata(y.metadata))
    kept_dy, kept_y = jnp.stack(pairs, axis=-1).reshape(rows, kept), y.values.astype(jnp.float32)
    dh = dataclasses.replace(y, values=(kept_dy * (2 * jnp.sqrt(kept_y))).astype(dy.dtype))

    def transpose(x: Sparse24 | SparseVenom) -> Sparse24:
        method = "magnitude" if key is None else "mvue"
        return sparsify_24(x.to_dense(), method, 0, dtype=x.dtype, key=key)

    y_dy = jnp.sum(kept_y * kept_dy, axis=1)[: dy.shape[0]]
    return HiddenGradients(dh, transpose(dh), transpose(y), y_dy)


def gated_squared_relu_24(h: Array, *, sparsify: Callable[..., Sparse24] = sparsify_24) -> tuple[Sparse24, HiddenStats]:
    """`sparsify` may be another backend's `sparsify_24`."""
    gate, own = halves(h.astype(jnp.float32))
    y = (jnp.square(jax.nn.relu(gate)) * own).astype(h.dtype)
    sparse = sparsify(y, "magnitude", -1, dtype=h.dtype, key=None)
    return sparse, _stats(y, sparse.values)


def gated_squared_relu_gradients(
    dy: Array, h: Array, y: Sparse24, *, key: Array, sparsify: Callable[..., Sparse24] = sparsify_24
) -> HiddenGradients:
    """`sparsify` may be another backend's `sparsify_24`."""
    gate, own = halves(h.astype(jnp.float32))
    kept, relu = y.mask(), jax.nn.relu(gate)
    gradient = dy.astype(jnp.float32)
    of_all = gradient * own * (2 * relu), gradient * jnp.square(relu)
    of_kept = [jnp.where(kept, half, 0).astype(dy.dtype) for half in of_all]
    gates_first = compress_24(jnp.concatenate(of_kept, axis=1), jnp.tile(kept, (1, 2)))
    dense = y.to_dense()
    dh_t, y_t = (sparsify(x, "mvue", 0, dtype=x.dtype, key=key) for x in (by_turns(*of_kept), dense))
    y_dy = jnp.sum(jnp.where(kept, dense.astype(jnp.float32) * gradient, 0), axis=1)
    return HiddenGradients(gates_first, dh_t, y_t, y_dy)


def hidden_gradients(
    dy: Array, saved: Array, activation: str, *, key: Array, sparsify: Callable[..., Sparse24] = sparsify_24
) -> tuple[Array, Sparse24, Array]:
    """`sparsify` may be another backend's `sparsify_24`."""
    saved32 = saved.astype(jnp.float32)  # of which 16-bit floats may have no product, and whose differences lose bits
    dh = gradient(dy.astype(jnp.float32), saved32, activation).astype(dy.dtype)
    dh_t = sparsify(dh, "mvue", 0, dtype=dh.dtype, key=key)
    return dh, dh_t, hidden(saved32, activation).astype(saved.dtype)


def matmul_24(w: Sparse24, b: Array, *, out_transposed: bool = False, out_dtype: DTypeLike) -> Array:
    if out_transposed:  # XLA has no 16-bit product on CPUs whose float32 result is transposed afterwards
        return _dot(b.T, w.to_dense().T).astype(out_dtype)
    return _dot(w.to_dense(), b).astype(out_dtype)


def matmul_24_fp8(
    a: Sparse24, b_t: Array, scale: Array, columns: Array | None = None, *, out_dtype: DTypeLike
) -> Array:
    product = _dot(a.to_dense(), b_t.T).astype(out_dtype) * scale.astype(out_dtype)
    return product if columns is None else product * columns.astype(out_dtype)


def matmul_venom(a: SparseVenom, b: Array, *, rows: RowOrder | None = None, out_dtype: DTypeLike) -> Array:
    condensed = a.condensed()
    columns = a.columns[:, : condensed.shape[1]]

    def product(block: Array, columns: Array) -> Array:
        return _dot(block, _rows(b, columns)).astype(out_dtype)

    return combine(_map_blocks(product, condensed, columns, a.v, width=b.shape[1]), rows)


def sampled_matmul_24(
    w: Sparse24,
    x: Array,
    neuron_ids: Array,
    v: int,
    *,
    contiguous: int = 1,
    squared_relu: bool = False,
    out_dtype: DTypeLike,
) -> Array:
    del contiguous  # single rows will do
    # The weights are those of all layers; the tokens of one may read few of their rows.
    take = w.take_rows if neuron_ids.size < w.shape[0] else functools.partial(_rows, w.to_dense())

    def product(block: Array, neurons: Array) -> Array:
        h = _dot(block, take(neurons).T).astype(out_dtype)
        return jnp.square(jax.nn.relu(h)) if squared_relu else h

    return _map_blocks(product, x, neuron_ids, min(v, x.shape[0]), width=x.shape[1])


def scattered_matmul_24(
    a: Sparse24, b: Array, neuron_ids: Array, v: int, rows: int, *, contiguous: int = 1, out_dtype: DTypeLike
) -> Array:
    del contiguous
    condensed, tokens = a.to_dense(), a.shape[1]
    blocks = jnp.pad(condensed, ((0, 0), (0, -tokens % v))).reshape(condensed.shape[0], -1, v).swapaxes(0, 1)
    spread = jax.vmap(lambda block, listed: jnp.zeros((rows, v), a.dtype).at[listed].set(block, mode="drop"))
    dense = spread(blocks, neuron_ids).swapaxes(0, 1).reshape(rows, -1)[:, :tokens]
    return _dot(dense, b).astype(out_dtype)


def _squared_relu(h: Array) -> Array:
    """Computes relu(h)^2 in float32, rounded once."""
    return jnp.square(jax.nn.relu(h.astype(jnp.float32))).astype(h.dtype)


def _stats(y: Array, kept: Array) -> HiddenStats:
    def energy(x: Array) -> Array:
        return jnp.sum(jnp.square(x.astype(jnp.float32)))

    return HiddenStats(jnp.sum(y != 0, dtype=jnp.float32), energy(y), energy(kept))


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _rows(x: Array, rows: Array) -> Array:
    """Takes rows of x; one past the last is a row of zeros."""
    return jnp.take(x, rows, axis=0, mode="fill", fill_value=0)


def _map_blocks(product: Callable[[Array, Array], Array], x: Array, columns: Array, v: int, width: int) -> Array:
    """Computes `product(block, columns of the block)` for each v rows of x; results one under the other.

    As many blocks at a time as keep the gathered rows, `width` wide, under a fixed size.
    """
    rows = x.shape[0]
    blocks = jnp.pad(x, ((0, -rows % v), (0, 0))).reshape(-1, v, x.shape[1])
    at_a_time = max(1, _GATHERED_ELEMENTS // (columns.shape[1] * width))
    operands = blocks, columns[: blocks.shape[0]]
    products = lax.map(lambda block: product(*block), operands, batch_size=at_a_time)
    return products.reshape(-1, products.shape[-1])[:rows]


def grouped_up(x: Array, w: Array, block_experts: Array, v: int, experts: int, *, padded: bool = False) -> Array:
    """Padding is multiplied, whatever it is with: tokens of zeros stay such."""
    return _ragged_dot(x, w, block_experts, v, experts, axis=2)


def grouped_down(y: Array, w: Array, block_experts: Array, v: int, experts: int, *, padded: bool = False) -> Array:
    return _ragged_dot(y, w, block_experts, v, experts, axis=1)


def grouped_weights(y: Array, x: Array, block_experts: Array, v: int, experts: int, *, out_dtype: DTypeLike) -> Array:
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])

    @sequential_vmap
    def ragged(y: Array, x: Array, block_experts: Array) -> Array:
        sizes = group_sizes(block_experts, v, experts)
        return lax.ragged_dot_general(y, x, sizes, numbers, preferred_element_type=jnp.float32)

    def by_block(y: Array, x: Array, block_experts: Array) -> Array:
        def add(total: Array, block: tuple[Array, Array, Array]) -> tuple[Array, None]:
            y, x, expert = block
            return total.at[expert].add(jnp.matmul(y.T, x, preferred_element_type=jnp.float32)), None

        zeros = jnp.zeros_like(y, jnp.float32, shape=(experts, y.shape[1], x.shape[1]))  # varies over a mesh as y does
        return lax.scan(add, zeros, (_blocks(y, v), _blocks(x, v), block_experts))[0]

    out = lax.platform_dependent(y, x, block_experts, cpu=by_block, default=ragged)
    return out.reshape(-1, x.shape[1]).astype(out_dtype)


def _blocks(x: Array, v: int) -> Array:
    return x.reshape(-1, v, x.shape[1])


def _ragged_dot(x: Array, w: Array, block_experts: Array, v: int, experts: int, *, axis: int) -> Array:
    """Multiplies blocks of tokens by their experts' weights, along an axis of [experts, S, D]."""
    w, contracted = w.reshape(experts, -1, w.shape[1]), ((1,), (axis,))
    if v == 1:  # a few tokens, as in generation: of several texts under vmap, which the ragged product has not
        dimensions = contracted, ((0,), (0,))
        return lax.dot_general(x, w[block_experts], dimensions, preferred_element_type=jnp.float32).astype(x.dtype)
    numbers = lax.RaggedDotDimensionNumbers((contracted, ((), ())), [0], [0])

    @sequential_vmap  # the ragged product has no vmap over all of its operands
    def ragged(x: Array, w: Array, block_experts: Array) -> Array:
        sizes = group_sizes(block_experts, v, experts)
        return lax.ragged_dot_general(x, w, sizes, numbers, preferred_element_type=jnp.float32)

    def by_block(x: Array, w: Array, block_experts: Array) -> Array:
        """Computes what the ragged product does: XLA's for CPUs multiplies every token with every expert."""

        def one(block: tuple[Array, Array]) -> Array:
            x, expert = block
            return lax.dot_general(x, w[expert], (((1,), (axis - 1,)), ((), ())), preferred_element_type=jnp.float32)

        products = lax.map(one, (_blocks(x, v), block_experts))
        return products.reshape(-1, products.shape[-1])

    return lax.platform_dependent(x, w, block_experts, cpu=by_block, default=ragged).astype(x.dtype)


def cross_entropy(x: Array, w: Array, targets: Array, classes: int) -> tuple[Array, Array]:
    losses, odds = odds_of_logits(jnp.matmul(x, w.T, preferred_element_type=jnp.float32), targets, classes)
    return losses, odds.astype(x.dtype)


def fp8_rows(x: Array) -> tuple[fp8.Scaled, fp8.Scaled]:
    rows = fp8.by_rows(x)
    return rows, rows.T


def fp8_squared_relu(h: fp8.Unscaled) -> tuple[tuple[fp8.Scaled, fp8.Scaled], HiddenStats]:
    y = jnp.square(jax.nn.relu(h.scaled()))
    return fp8_rows(y), _stats(y, y)


def fp8_squared_relu_gradients(dy: fp8.Unscaled, h: fp8.Unscaled) -> tuple[fp8.Scaled, fp8.Scaled]:
    return fp8_rows(dy.scaled() * 2 * jnp.sqrt(jnp.square(jax.nn.relu(h.scaled()))))


def add_norm(x: Array, update: Array | None, scale: Array, epsilon: float) -> tuple[Array, Array]:
    """The derivative is JAX's own."""
    total = x if update is None else checkpoint_name(x + update, SAVED)
    return total, rms_norm(total, scale, epsilon)
