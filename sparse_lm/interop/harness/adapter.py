"""The harness's interface to a model."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows
from tqdm import tqdm

from sparse_lm.interop.harness.text_model import HarnessError, TextModel
from sparse_lm.model import decode

_log = logging.getLogger(__name__)

GENERATION_KWARGS = {"until", "max_gen_toks", "do_sample", "temperature", "top_p"}


class HarnessModel(TemplateLM):
    """Answers the harness's requests as its own backend for transformers does.

    That is: no token is added to a text, an empty context is the end of a document, a request longer
    than the model's context loses its beginning, and greedy generation stops at `until` or at the end
    of the document. `TemplateLM` splits requests into context and continuation.
    """

    def __init__(self, model: TextModel):
        super().__init__()
        self._model = model

    @property
    def eot_token_id(self) -> int:
        return self._model.end_of_text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        return self._model.tokenizer.encode(string, add_special_tokens=False).ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs
    ) -> list[tuple[float, bool]]:
        seq_len = self._model.seq_len
        sequences = []
        for (_, continuation), context, scored in requests:
            if not 0 < len(scored) <= seq_len:
                raise HarnessError(f"a continuation has {len(scored)} tokens, must be 1 to {seq_len}: {continuation!r}")
            tokens = [*(context or [self.prefix_token_id]), *scored]
            sequences.append((tokens[-(seq_len + 1) :], len(scored)))
        self._log_truncated(sum(len(context) + len(scored) > seq_len + 1 for _, context, scored in requests))
        return self._model.log_likelihoods(sequences)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        sequences, owners = [], []
        for owner, request in enumerate(requests):
            (text,) = request.args
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, max_seq_len=self._model.seq_len, context_len=1
            )
            for inputs, predicted in windows:
                sequences.append(([*inputs, predicted[-1]], len(predicted)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (log_likelihood, _) in zip(owners, self._model.log_likelihoods(sequences), strict=True):
            totals[owner] += log_likelihood
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        by_kwargs = defaultdict(list)
        for index, request in enumerate(requests):
            by_kwargs[repr(request.args[1])].append(index)
        texts = [""] * len(requests)
        for indices in by_kwargs.values():
            made = self._generate([requests[index] for index in indices])
            for index, text in zip(indices, made, strict=True):
                texts[index] = text
        return texts

    def _generate(self, requests: Sequence[Instance]) -> list[str]:
        """Answers requests that have the same arguments. A request's number is its seed."""
        task, kwargs = requests[0].task_name, normalize_gen_kwargs(requests[0].args[1])
        if unknown := kwargs.keys() - GENERATION_KWARGS:
            allowed = ", ".join(sorted(GENERATION_KWARGS))
            raise HarnessError(f"{task}: generation_kwargs has {', '.join(sorted(unknown))}; allowed are {allowed}")
        new, seq_len = kwargs["max_gen_toks"], self._model.seq_len
        if not 0 < new < seq_len:
            raise HarnessError(
                f"{task}: max_gen_toks = {new} must be 1 to {seq_len - 1}, the model takes {seq_len} tokens"
            )
        temperature = kwargs.get("temperature", 0.0) if kwargs["do_sample"] else 0.0
        top_p = kwargs.get("top_p", 1.0)
        prompts = [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests]
        room = seq_len - new
        self._log_truncated(sum(len(prompt) > room for prompt in prompts))
        prompts = [prompt[-room:] for prompt in prompts]
        texts = [""] * len(requests)
        batches = list(self._model.batches([len(prompt) + new for prompt in prompts]))
        options = dict(max_new_tokens=new, temperature=temperature, top_p=top_p, stop=self._model.end_of_text)
        for batch in tqdm(batches, desc="batches of continuations", disable=None):
            # A batch that is not full repeats its first text: other padding might go on for longer.
            rows = [*batch.indices, *batch.indices[:1] * (batch.rows - len(batch.indices))]
            of_rows = [prompts[row] for row in rows]
            made = decode.generate(self._model.graphdef, self._model.params, of_rows, seeds=rows, **options)
            for row, tokens in zip(batch.indices, made, strict=False):
                texts[row] = self._model.tokenizer.decode(tokens)
        for end in filter(None, kwargs["until"]):
            texts = [text.partition(end)[0] for text in texts]
        return texts

    def _log_truncated(self, count: int) -> None:
        if count:
            _log.warning("%d requests are longer than %d tokens and lose their beginning", count, self._model.seq_len)
