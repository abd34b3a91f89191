"""Continuations up to strings that end them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tqdm import tqdm

from sparse_lm.interop.harness.batches import batches
from sparse_lm.interop.harness.text_model import TextModel
from sparse_lm.model import decode

FIRST_ROUND = 16  # tokens made before a text is looked at


def continuations(
    model: TextModel,
    prompts: Sequence[Sequence[int]],
    *,
    until: Sequence[str],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
) -> list[str]:
    """Continues prompts, and returns the texts without special tokens.

    A string can end anywhere within tokens, so that only their text tells where to stop. Texts are
    looked at in rounds, each as long as all before it: at most half of the tokens are made in vain,
    and a prompt is computed anew only a few times.

    Args:
      model: has room for each prompt and `max_new_tokens`.
      prompts: token ids, at least one each.
      until: strings that end a text, and are not part of it. So does the end of the document.
      max_new_tokens: the most tokens to make.
      temperature, top_p: as in `decode.generate`; a prompt's number is its seed.
    """
    made: list[list[int]] = [[] for _ in prompts]
    unfinished = list(range(len(prompts)))
    total = 0  # tokens of every unfinished text
    with tqdm(total=len(prompts), desc="continuations", disable=None) as bar:
        while unfinished and total < max_new_tokens:
            new = min(max(total, FIRST_ROUND), max_new_tokens - total)
            contexts = [[*prompts[index], *made[index]] for index in unfinished]
            for batch in batches([len(context) + new for context in contexts], model.seq_len, model.batch_tokens):
                # A batch that is not full repeats its first text: other padding might go on for longer.
                rows = [*batch.indices, *batch.indices[:1] * (batch.rows - len(batch.indices))]
                continued = decode.generate(
                    model.graphdef,
                    model.params,
                    [contexts[row] for row in rows],
                    max_new_tokens=new,
                    temperature=temperature,
                    top_p=top_p,
                    seeds=[unfinished[row] for row in rows],
                    stop=model.end_of_text,
                )
                for row, tokens in zip(batch.indices, continued, strict=False):
                    made[unfinished[row]] += tokens
            total += new
            texts = {index: model.tokenizer.decode(made[index]) for index in unfinished}
            going_on = [i for i, text in texts.items() if len(made[i]) == total and text == _before(until, text)]
            bar.update(len(unfinished) - len(going_on))
            unfinished = going_on
        bar.update(len(unfinished))
    return [_before(until, model.tokenizer.decode(tokens)) for tokens in made]


def _before(ends: Sequence[str], text: str) -> str:
    """Cuts a text before the first of the strings in it."""
    return functools.reduce(lambda text, end: text.partition(end)[0], ends, text)
