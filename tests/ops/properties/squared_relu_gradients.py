"""Of `squared_relu_gradients`: the bits of the reference on a device, by default the one that the kernels run on."""

import jax
import jax.numpy as jnp
import numpy as np

from sparse_lm.ops import reference
from tests.ops.operands import assert_same_bits, random_or_special


def check(squared_relu_gradients, dy, y, *, drawn=False, device=None):
    """Twice; if drawn, with several keys."""
    compute, expected = (
        jax.jit(lambda dy, y, key, f=f: f(dy, y, key=key))
        for f in (squared_relu_gradients, reference.squared_relu_gradients)
    )
    for key in (jax.random.key(2), jax.random.fold_in(jax.random.key(3), 4)) if drawn else (None,):
        wanted = expected(*jax.device_put((dy, y, key), device))
        for _ in range(2):
            ours = compute(dy, y, key)
            if drawn:  # compiled for an H100, the reference loses the signs of zeros that are drawn, at some shapes
                ours, wanted = _without_signs_of_zeros(ours), _without_signs_of_zeros(wanted)
            assert_same_bits(ours, wanted)


def check_24(squared_relu_gradients, shape, dtype, *, special, drawn=False, device=None):
    """Of a 2:4 Y."""
    y, _ = jax.jit(reference.squared_relu_24)(random_or_special(shape, dtype, 1))
    dy = random_or_special(shape, dtype, 2, special)
    check(squared_relu_gradients, dy, y, drawn=drawn, device=device)


def check_venom(squared_relu_gradients, tokens, neurons, v, m, *, drawn=False, device=None):
    """Of a Venom Y, bfloat16."""
    h = random_or_special((tokens, neurons), jnp.bfloat16, 3)
    y, _ = jax.jit(lambda h: reference.squared_relu_venom(h, v, m))(h)
    dy = random_or_special((tokens, 4 * neurons // m), jnp.bfloat16, 4)
    check(squared_relu_gradients, dy, y, drawn=drawn, device=device)


def _without_signs_of_zeros(tree):
    return jax.tree.map(lambda x: np.asarray(x) + np.zeros((), x.dtype), tree)
