"""Log-likelihoods against the model in float64 numpy."""

import numpy as np
import pytest

from sparse_lm.interop.harness import scoring
from sparse_lm.interop.harness.scoring import Scored, log_likelihoods
from tests.interop.harness.examples import MODEL, text_model
from tests.interop.models import random_params
from tests.model import numpy_llama

SEQ_LEN = 70


@pytest.fixture(scope="module")
def sequences():
    """Ragged, some with as many tokens as can be scored; the last ones end as the model would go on."""
    rng = np.random.default_rng(0)
    lengths = [2, 5, 31, 32, 33, 34, 50, 70, 71, 9]
    counts = [1, 5 - 1, 7, 1, 2, 33, 20, 1, 70, 3]
    tokens = [rng.integers(MODEL.vocab_size, size=length).tolist() for length in lengths]
    for row in tokens[-3:]:
        row[-1] = int(logits(row[:-1])[-1].argmax())
    return [Scored(*pair) for pair in zip(tokens, counts, strict=True)]


def logits(tokens):
    return numpy_llama.forward(random_params(MODEL), MODEL, np.array([tokens]))[0]


def test_log_likelihoods(sequences):
    scoring._score.clear_cache()
    model = text_model(SEQ_LEN, batch_tokens=100)
    results = log_likelihoods(model, sequences)
    for (tokens, count), (total, greedy) in zip(sequences, results, strict=True):
        predictions, targets = logits(tokens[:-1])[-count:], np.array(tokens[-count:])
        assert total == pytest.approx(-numpy_llama.cross_entropy(predictions, targets).sum(), rel=1e-5)
        assert greedy == (predictions.argmax(-1) == targets).all()
    assert {greedy for _, greedy in results} == {True, False}
    assert scoring._score._cache_size() == 3  # of 32, 64 and 70 tokens

    backwards = log_likelihoods(model, sequences[::-1])
    np.testing.assert_allclose([total for total, _ in backwards], [total for total, _ in results[::-1]], rtol=1e-6)
