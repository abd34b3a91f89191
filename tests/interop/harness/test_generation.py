"""Texts against one prompt at a time, all of it at once."""

import pytest

from sparse_lm.interop.harness.generation import continuations
from sparse_lm.model import decode
from tests.interop.harness.examples import text_model

PROMPTS = [[5], [7, 8, 9] * 4, [30, 31], [5], [100] * 9]


@pytest.fixture(scope="module")
def model():
    return text_model(seq_len=64, batch_tokens=128)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_text_depends_on_its_prompt_and_number_alone(model, temperature):
    """Not on the batches, nor on how many tokens are made before a text is looked at."""
    options = dict(max_new_tokens=32, temperature=temperature, top_p=0.95)
    whole = [
        model.tokenizer.decode(
            *decode.generate(model.graphdef, model.params, [prompt], seeds=[number], stop=model.end_of_text, **options)
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    assert continuations(model, PROMPTS, until=[], **options) == whole
    until = [whole[1][-3:-1], whole[2][2:4]]
    cut = [min((text.split(end)[0] for end in until), key=len) for text in whole]
    assert continuations(model, PROMPTS, until=until, **options) == cut
    assert cut[2] == whole[2][: len(cut[2])] != whole[2]
