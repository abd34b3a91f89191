"""No output may depend on a later token of its own sequence.

The tests perturb the inputs from some position on and look at what comes before it. What a recipe decides from one
token alone (weights, 2:4 of a row, a token's expert) passes exactly. The one decision that looks at several tokens is
`venom`'s choice of neurons for a block of v rows in training: which tokens share a block, the formulas of
tests/recipes/test_ffn.py say, and that tokens come in a random order, tests/model/test_llama.py.
"""

import jax
import numpy as np
import pytest

from sparse_lm.model import llama
from tests import small

PERTURBED = 20  # the first position that changes, of 32


@pytest.mark.parametrize("name", ["act24", "slices", "experts24"])
def test_outputs_are_causal(name):
    """Recipes that choose neurons or permute tokens are causal in training.

    Others, and `dense_slices`, which routes as `slices` does, compute in training what they do in evaluation;
    tests/recipes/test_ffn.py says of all recipes that they evaluate each token for itself.
    """
    config = small.config(name)
    recipe, key = config.sparsity.recipe, jax.random.key(3)
    trainer, _ = small.compiled(config)
    state = small.entered(config)
    inputs = small.windows(config)[:, :-1]
    changed = inputs.copy()
    changed[:, PERTURBED:] = (inputs[:, PERTURBED:] + 1) % config.model.vocab_size

    @jax.jit
    def forward(tokens):
        model = llama.merge(trainer.graphdef, state.params)
        return model(tokens, recipe=recipe, recipe_state=state.recipe_state, key=key)[0]

    before, after = np.asarray(forward(inputs)), np.asarray(forward(changed))
    # Rows move to other places in the batch, where XLA may sum in another order.
    np.testing.assert_allclose(before[:, :PERTURBED], after[:, :PERTURBED], rtol=1e-4, atol=1e-5)
    assert np.abs(before[:, PERTURBED:] - after[:, PERTURBED:]).max() > 0.1
