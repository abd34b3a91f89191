"""Prepares data: a TFDS dataset of packed windows, in ArrayRecord files, beside its tokenizer.

A prepared directory is an ordinary TFDS directory (`tfds.builder_from_directory` reads it) with splits `train` and
`heldout` of one feature, `tokens` [seq_len + 1], plus tokenizer.json. Its metadata.json records how it was made.
TensorFlow is not needed to write or to read it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from sparse_lm.data import packing
from sparse_lm.data import tokenizer as tokenizer_lib
from sparse_lm.data.corpus import Corpus
from sparse_lm.data.dataset import FORMAT, TOKENIZER_FILE
from sparse_lm.data.holdout import Survey, hold_out, sample, sum_up, survey_documents
from sparse_lm.data.workers import Workers

_log = logging.getLogger(__name__)

TOKENIZER_SAMPLE = 512 * 2**20  # bytes of text that a tokenizer is trained on at most


def prepare(
    directory: Path,
    corpus: Corpus,
    *,
    seq_len: int,
    heldout: Corpus | None = None,
    tokenizer: Tokenizer | None = None,
    vocab_size: int = 4096,
    processes: int = 1,
) -> None:
    """Writes prepared data to `directory`, which is no link, and new or empty.

    The directory appears complete, by one rename, or not at all. Until then everything is in a hidden folder beside
    it, which only a kill leaves behind.

    Args:
      corpus: documents to train on, and to hold some out of unless `heldout`, documents to evaluate on, is given.
      seq_len: targets of a window.
      tokenizer: None to train one with `vocab_size` entries on the training documents.
      processes: to use at most; the result does not depend on it.

    Raises:
      DataError: the text cannot be read, or does not go with the tokenizer.
      OSError: `directory` cannot be written, or something is in it, perhaps since another process made it meanwhile.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    # One part is read by this process, and tokenised by as many threads as there are cores.
    used = max(1, min(processes, max(len(part.parts()) for part in (corpus, heldout) if part)))
    hidden = tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent)
    with hidden as name, Workers(used, threads=processes // used) as workers:
        folder = Path(name)

        def on_parts(what: str, function: Callable, corpus: Corpus) -> Iterator[Any]:
            return workers.map(what, function, [(part,) for part in corpus.parts()])

        def survey(corpus: Corpus) -> Survey:
            return sum_up(on_parts("reading the text", survey_documents, corpus))

        if heldout is None:
            train, rest, found = hold_out(corpus, survey)
            size = found.size
        else:
            train, rest = corpus, heldout
            evaluated = list(on_parts("reading the held-out text", survey_documents, heldout))
            other = sum_up(evaluated, what="the held-out text")
            found = sum_up(on_parts("reading the text", survey_documents, corpus), others=evaluated)
            if found.repeated:
                warning = "%s of the training documents are held out, too: evaluation will read what was trained on"
                _log.warning(warning, f"{found.repeated:,}")
            found = dataclasses.replace(
                found,
                sha256=hashlib.sha256((found.sha256 + other.sha256).encode()).hexdigest(),
                documents=found.documents + other.documents,
                replaced=found.replaced + other.replaced,
            )
            size = found.size + other.size
        if found.replaced:
            _log.warning(
                "%s of %s documents have bytes that are not UTF-8, or a U+FFFD, as which such bytes are read",
                f"{found.replaced:,}",
                f"{found.documents:,}",
            )
        if tokenizer is None:
            sampled = sample(train, min(1.0, TOKENIZER_SAMPLE / found.size))
            _log.info("training the tokenizer, on a sample of the text")
            texts = on_parts("sampling text for the tokenizer", list, sampled)
            tokenizer = tokenizer_lib.train_tokenizer(itertools.chain.from_iterable(texts), vocab_size)
        metadata = {
            "format": FORMAT,
            "corpus_sha256": found.sha256,
            "tokenizer_sha256": tokenizer_lib.fingerprint(tokenizer),
            "vocab_size": tokenizer_lib.vocabulary_size(tokenizer),
            "end_of_text": tokenizer_lib.end_of_text(tokenizer),
            "seq_len": seq_len,
            "splits": {},
        }
        files = {}
        for split, what, part in (("train", "training text", train), ("heldout", "held-out text", rest)):
            spelled, counts = tokenizer.to_str(), Counter()
            tasks = [(folder / f"{split}-{n}", documents, spelled) for n, documents in enumerate(part.parts())]
            files[split], metadata["splits"][split] = folder / split, counts
            with open(folder / split, "wb") as stream:
                for (path, *_), more in zip(tasks, workers.map(f"tokenising {what}", _tokenise, tasks), strict=True):
                    counts.update(more)
                    with open(path, "rb") as tokens:
                        shutil.copyfileobj(tokens, stream)
                    path.unlink()
            if (tokens := counts["tokens"]) < seq_len:
                repeats = "the %s has %d tokens: a window of %d repeats them, so that losses come out too low"
                _log.warning(repeats, what, tokens, seq_len)
        kept = sum(counts["bytes"] for counts in metadata["splits"].values())
        if abs(kept - size) > found.documents + size / 100:  # a space before each document is no loss
            lost = "the tokens spell %s bytes of a text of %s: the tokenizer changes it, and bits per byte are off"
            _log.warning(lost, f"{kept:,}", f"{size:,}")
        complete = folder / "complete"
        packing.write(files, complete, metadata, workers)
        tokenizer_lib.save_tokenizer(tokenizer, complete / TOKENIZER_FILE)
        complete.rename(directory)


def _tokenise(path: Path, corpus: Corpus, json_text: str) -> dict[str, int]:
    """Writes documents as tokens, an end of text behind each, and counts documents, tokens and bytes of text."""
    tokenizer, lengths = _load(json_text)
    dtype, end_of_text = tokenizer_lib.token_dtype(len(lengths)), tokenizer_lib.end_of_text(tokenizer)
    documents, count, size = 0, 0, 0
    with open(path, "wb") as file:
        for tokens in tokenizer_lib.tokenize(corpus, tokenizer):
            file.write(np.append(tokens, dtype.type(end_of_text)))
            documents, count, size = documents + 1, count + len(tokens) + 1, size + int(lengths[tokens].sum())
    return {"documents": documents, "tokens": count, "bytes": size}


@functools.lru_cache(maxsize=1)
def _load(json_text: str) -> tuple[Tokenizer, np.ndarray]:
    """Returns a tokenizer and the bytes of text that each of its tokens stands for."""
    tokenizer = Tokenizer.from_str(json_text)
    return tokenizer, tokenizer_lib.bytes_per_token(tokenizer)
