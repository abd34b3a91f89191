"""The unbiased 2:4 estimate of minimum variance (MVUE, 2203.10991), for gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from sparse_lm.ops.select import Members


def sample_two(members: Members, uniform: Array) -> tuple[Array, Array, list[Array]]:
    """Draws two members of each group in proportion to their magnitudes, but none more than surely.

    Dividing a member by the probability p that it is drawn makes the estimate unbiased; the variance, the sum of
    x^2 (1 / p - 1), is least where p is in proportion to |x|, or 1 (0.47 of the signal on Gaussians). With h the
    lesser of half the group's magnitudes and of what they add up to without the largest, p = min(|x| / h, 1) and
    x / p = sign(x) max(|x|, h): no division, and of a group with at most two non-zeros these, exactly.

    The draw is systematic (Madow, 1949): the members lie one after the other on a line, each min(|x|, h) long and 2 h
    together, and are drawn where they cover a random point of the first h or the point h further on. A member longer
    than h ends behind the first point and begins before the second. So comparing the points with sums of |x| that are
    not cut to h, from the start for the first and from the end for the second, draws the same.

    The point has 16 random bits, so that p is right to within 2^-16, and the expectation of x / p to within 2^-16 h. A
    member below 2^-17 h is never drawn where it lies at an end of the line, such as the first of its group.

    Members are float32, and so are the random numbers of `uniform_of_groups`.

    Returns:
      (first, second, estimates): ascending positions, uint32, and all four members divided by their
      probabilities; the caller keeps those at the two positions.
    """
    a, b, c, d = (jnp.abs(x) for x in members)
    ab, cd = a + b, c + d
    without_largest = jnp.minimum(jnp.minimum(a, b) + cd, jnp.minimum(c, d) + ab)  # a sum, without cancellation
    half = jnp.minimum((ab + cd) * 0.5, without_largest)

    point, from_the_end = uniform * half, (1 - uniform) * half
    past_a, past_b = point > a, point > ab
    first = jnp.where(past_b, jnp.uint32(2), jnp.where(past_a, jnp.uint32(1), jnp.uint32(0)))
    in_cd, in_d = (from_the_end < cd) | past_a, (from_the_end < d) | past_b  # rounding draws none twice
    second = jnp.where(in_d, jnp.uint32(3), jnp.where(in_cd, jnp.uint32(2), jnp.uint32(1)))
    return first, second, [jnp.copysign(jnp.maximum(jnp.abs(x), half), x) for x in members]


def uniform_of_groups(key: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Makes a random number between 0 and 1, neither of them reached, for each group of a matrix.

    `shape` is that of the members, as `select.split_groups` gives them along the axis, -1 or 0. Four groups share the
    64 bits of a key of `jax.random.split`, from the lower half of its first word to the upper half of its second. The
    numbers are float32, multiples of 2^-17.
    """
    groups, others = shape if axis == 0 else shape[::-1]
    keys = jax.random.split(key, (groups // 4, others) if axis == 0 else (others, groups // 4))
    words = jax.random.key_data(keys)[..., :2, None]
    halves = jnp.concatenate([words & 0xFFFF, words >> 16], axis=-1).reshape(*keys.shape, 4)
    in_order = jnp.moveaxis(halves, -1, 1) if axis == 0 else halves
    return (in_order.reshape(shape).astype(jnp.float32) + 0.5) / 2**16


def threefry_key(key: Array) -> Array:
    """Converts a PRNG key to int32 [2], as kernels read it.

    Raises:
      NotImplementedError: a key of another generator than JAX's default one, or `jax_threefry_partitionable` is off.
    """
    generator = str(jax.random.key_impl(key))
    if generator != "threefry2x32" or not jax.config.jax_threefry_partitionable:
        raise NotImplementedError(
            f"draws from keys of a partitionable threefry2x32, not of {generator} with "
            f"jax_threefry_partitionable = {jax.config.jax_threefry_partitionable}"
        )
    return lax.bitcast_convert_type(jax.random.key_data(key), jnp.int32)
