r"""Continues prompts with a trained model, from its workdir alone.

    python -m sparse_lm.generate --workdir=runs/tiny --prompt="def main(" --prompt="class " --max_new_tokens=64 \
        --temperature=0.8 --checkpoint=best

Prints each prompt and its continuation.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from sparse_lm import entry_point
from sparse_lm.data.tokenizer import end_of_text, load_tokenizer
from sparse_lm.model import decode, llama
from sparse_lm.training.checkpoints.restored import restore_model
from sparse_lm.training.workdir import load_config

_log = logging.getLogger(__name__)

OPTIONS = ("max_new_tokens", "checkpoint", "temperature", "top_p", "seed")


def continue_texts(
    workdir: str | os.PathLike,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    checkpoint: int | str = "latest",
    seed: int = 0,
    **sampling: float,
) -> list[str]:
    """Continues prompts with a checkpoint of a run; returns each with its continuation.

    Args:
      prompts: texts; an empty one for a new document.
      max_new_tokens: the most tokens to make; the end of the document ends it sooner.
      checkpoint: "latest", "best" (least held-out loss in training) or a step.
      seed: of the first prompt's random numbers; that of each other is one more than the one before it.
      **sampling: temperature and top_p of `model.decode.generate`.

    Raises:
      WorkdirError, ConfigError, DataError: config, checkpoint or tokenizer are absent or cannot be used.
    """
    config = load_config(workdir)
    tokenizer = load_tokenizer(Path(workdir, "tokenizer.json"))
    params, recipe, recipe_state, step = restore_model(workdir, config, checkpoint)
    _log.info("checkpoint of step %d", step)
    tokenizer.encode_special_tokens = True  # as text, as in a corpus
    end = end_of_text(tokenizer)
    encoded = [tokenizer.encode(prompt, add_special_tokens=False).ids or [end] for prompt in prompts]
    total = max(map(len, encoded), default=0) + max_new_tokens
    if total > config.seq_len:
        _log.warning("a text of %d tokens is longer than a training sequence, %d", total, config.seq_len)
    seeds = [(seed + number) % 2**32 for number in range(len(prompts))]
    sparse = dict(recipe=recipe, recipe_state=recipe_state, dense_layers=config.sparsity.dense_layers)
    options = dict(max_new_tokens=max_new_tokens, seeds=seeds, stop=end, **sampling, **sparse)
    made = decode.generate(llama.graphdef(config.model), params, encoded, **options)
    return [tokenizer.decode([*tokens, *new]) for tokens, new in zip(encoded, made, strict=True)]


def main() -> None:
    options = {name: flags.FLAGS[name].value for name in OPTIONS}
    print(*continue_texts(flags.FLAGS.workdir, flags.FLAGS.prompt, **options), sep="\n")


def _define_flags() -> None:
    entry_point.define_run_flags()
    flags.DEFINE_multi_string("prompt", [""], "Text to continue, empty for a new document; repeated for several.")
    undecoded = re.compile("[\ud800-\udfff]")  # as which Python takes bytes that are not UTF-8
    flags.register_validator("prompt", lambda texts: not any(map(undecoded.search, texts)), "must be UTF-8")
    flags.DEFINE_integer("max_new_tokens", 64, "The most tokens to make.", lower_bound=0, upper_bound=decode.MOST)
    flags.DEFINE_float("temperature", 0.8, "Divides the logits; 0: the most probable token.")
    flags.register_validator("temperature", lambda temperature: temperature >= 0, "must be 0 or more")
    flags.DEFINE_float("top_p", 0.95, "Sample among the most probable tokens that together reach it.")
    flags.register_validator("top_p", lambda top_p: 0 < top_p <= 1, "must be in (0, 1]")
    flags.DEFINE_integer("seed", 0, "Seed of the random numbers.", lower_bound=0, upper_bound=2**32 - 1)


_LESS = "a smaller --max_new_tokens, or fewer prompts"
cli = functools.partial(entry_point.run, main, _define_flags, takes_less_memory=_LESS)

if __name__ == "__main__":
    cli()
