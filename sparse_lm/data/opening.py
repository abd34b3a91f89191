"""From a config to data: opened where it is prepared, prepared where it is not."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from sparse_lm.config import Config, ConfigError
from sparse_lm.data import tfds_corpus
from sparse_lm.data import tokenizer as tokenizer_lib
from sparse_lm.data.builder import FORMAT, TOKENIZER_FILE, prepare
from sparse_lm.data.corpus import Corpus, python_library
from sparse_lm.data.dataset import Data, is_prepared, is_whole, open_prepared
from sparse_lm.data.errors import DataError
from sparse_lm.data.holdout import survey_corpus
from sparse_lm.data.tasks import available_cores

_log = logging.getLogger(__name__)


def open_data(config: Config) -> Data:
    """The data of a run.

    Without `data.path` it is the standard library's source, tokenised on first use and kept in
    `data.cache_dir`. With it, windows that `sparse_lm.prepare_data` wrote are read where they are;
    any other TFDS directory (feature `tokens` or `text`) is packed once, also into the cache.

    Raises:
      ConfigError: a key does not go with the data.
      DataError: the data itself is missing or damaged.
    """
    tokenizer = _load_tokenizer(config)
    if not config.data.path:
        data = _open_library(config, tokenizer)
    else:
        try:
            directory = tfds_corpus.find_dataset(config.data.path)
        except DataError as error:
            raise ConfigError("data.path", config.data.path, str(error)) from error
        opened = _open_windows if is_prepared(directory) else _open_foreign
        data = opened(config, directory, tokenizer)
    _check_vocabulary(config, data.vocab_size)
    return data


def _load_tokenizer(config: Config) -> Tokenizer | None:
    """The tokenizer that the config names, if it does."""
    if not config.data.tokenizer:
        return None
    try:
        return tokenizer_lib.load_tokenizer(config.data.tokenizer)
    except DataError as error:
        raise ConfigError("data.tokenizer", config.data.tokenizer, str(error)) from error


def _open_library(config: Config, tokenizer: Tokenizer | None) -> Data:
    corpus = python_library()
    return _open_cached(config, "python", survey_corpus(corpus).sha256, tokenizer, corpus)


def _open_windows(config: Config, directory: Path, tokenizer: Tokenizer | None) -> Data:
    data = open_prepared(directory)
    if tokenizer:
        _check_dtype(config, tokenizer, tokenizer_lib.token_dtype(data.vocab_size))
        if tokenizer_lib.fingerprint(tokenizer) != data.info["tokenizer_sha256"]:
            raise ConfigError(
                "data.tokenizer", config.data.tokenizer, f"must be empty or the one of the data, {data.tokenizer_path}"
            )
    if config.seq_len != data.seq_len:
        raise ConfigError("seq_len", config.seq_len, f"must be {data.seq_len}, with which {directory} was prepared")
    return data


def _open_foreign(config: Config, directory: Path, tokenizer: Tokenizer | None) -> Data:
    """Packs a TFDS dataset that some other program wrote."""
    beside = directory / TOKENIZER_FILE
    if tokenizer is None and beside.is_file():
        tokenizer = tokenizer_lib.load_tokenizer(beside)
    train, heldout = tfds_corpus.open_splits(directory, tokenizer and tokenizer_lib.end_of_text(tokenizer))
    if train.feature == "tokens":
        if tokenizer is None:
            raise ConfigError(
                "data.tokenizer", config.data.tokenizer, f"must name the tokenizer.json of the tokens in {directory}"
            )
        _check_dtype(config, tokenizer, train.dtype)
    name = directory.resolve().parent.name if directory.name[:1].isdigit() else directory.resolve().name
    return _open_cached(config, name, tfds_corpus.fingerprint(directory), tokenizer, train, heldout)


def _open_cached(
    config: Config, name: str, origin: str, tokenizer: Tokenizer | None, corpus: Corpus, heldout: Corpus | None = None
) -> Data:
    """Opens the windows made of `origin` for this config, or makes them.

    Args:
      config: the cache, the length of a window, and the vocabulary if a tokenizer is to be trained.
      name: what the folder is called, for people.
      origin: hash of the text.
      tokenizer: None to train one.
      corpus, heldout: documents, as `prepare` takes them; read only to make the windows.
    """
    _check_vocabulary(config, tokenizer_lib.vocabulary_size(tokenizer) if tokenizer else tokenizer_lib.MIN_VOCAB_SIZE)
    entries = tokenizer_lib.fingerprint(tokenizer) if tokenizer else config.model.vocab_size
    source = {"format": FORMAT, "origin": origin, "tokenizer": entries, "seq_len": config.seq_len}
    key = hashlib.sha256(json.dumps(source).encode()).hexdigest()[:16]
    directory = Path(config.data.cache_dir, f"{name}-{key}")
    try:
        data = open_prepared(directory)
    except DataError as error:
        if directory.exists():
            _log.warning("preparing the data again: %s", error)
        else:
            _log.info("preparing the data in %s", directory)
    else:
        if data.info["source"] == source:
            return data
        _log.warning("preparing the data again: %s was made from something else", directory)
    try:
        prepare(
            directory,
            corpus,
            heldout=heldout,
            seq_len=config.seq_len,
            tokenizer=tokenizer,
            vocab_size=config.model.vocab_size,
            source=source,
            processes=available_cores(),
            keep=is_whole,
        )
    except OSError as error:
        raise ConfigError("data.cache_dir", config.data.cache_dir, f"must be writable: {error}") from error
    return open_prepared(directory)


def _check_vocabulary(config: Config, needed: int) -> None:
    if needed > config.model.vocab_size:
        raise ConfigError(
            "model.vocab_size", config.model.vocab_size, f"must be at least {needed}, the entries of the tokenizer"
        )


def _check_dtype(config: Config, tokenizer: Tokenizer, dtype: np.dtype) -> None:
    largest = tokenizer_lib.vocabulary_size(tokenizer) - 1
    limit = int(np.iinfo(dtype).max)
    if largest > limit:
        raise ConfigError(
            "data.tokenizer",
            config.data.tokenizer,
            f"has ids up to {largest}; the prepared tokens are {dtype}, which holds ids up to {limit}",
        )
