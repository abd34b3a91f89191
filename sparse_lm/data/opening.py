"""Opens the data that a configuration names; Python's own source is prepared on first use."""

from __future__ import annotations

import hashlib
import logging
import math
import re
import shutil
from pathlib import Path

from tokenizers import Tokenizer

from sparse_lm.config import Config
from sparse_lm.data import tokenizer as tokenizer_lib
from sparse_lm.data.builder import prepare
from sparse_lm.data.corpus import python_library
from sparse_lm.data.dataset import FORMAT, Data, is_prepared, mix, open_prepared
from sparse_lm.data.workers import available_cores
from sparse_lm.errors import ConfigError, DataError

_log = logging.getLogger(__name__)


def open_data(config: Config) -> Data:
    """Opens the data of a run.

    Without `data.path` it is the standard library's source, tokenised on first use and kept in `data.cache_dir`. With
    it, windows that `sparse_lm.prepare_data` wrote are read where they are. Several of these with weights, such as
    data/a:0.7,data/b:0.3, are mixed.

    Raises:
      ConfigError: a key does not go with the data.
      DataError: the data itself is missing or damaged.
    """
    tokenizer = None
    if config.data.tokenizer:
        try:
            tokenizer = tokenizer_lib.load_tokenizer(config.data.tokenizer)
        except DataError as error:
            raise ConfigError("data.tokenizer", config.data.tokenizer, str(error)) from error
    if not config.data.path:
        data = _open_library(config, tokenizer)
    else:
        weights = _parse_mixture(config)
        parts = [_open_path(config, path, tokenizer) for path in weights]
        for part in parts:
            if part.info["tokenizer_sha256"] != parts[0].info["tokenizer_sha256"]:
                both = f"{part.directory} has another tokenizer than {parts[0].directory}"
                raise ConfigError("data.path", config.data.path, f"{both}: prepare them with the same --tokenizer")
        data = parts[0] if len(parts) == 1 else mix(config.data.path, parts, list(weights.values()))
    _check_vocabulary(config, data.vocab_size)
    separator, end = config.model.document_separator, data.info["end_of_text"]
    if separator not in (end, -1):
        reason = f"must be {end}, the end of text of {data.tokenizer_path}, or -1"
        raise ConfigError("model.document_separator", separator, reason)
    return data


def _parse_mixture(config: Config) -> dict[Path, float]:
    """Returns the directories that `data.path` names, and their weights: the only one, or such as a:0.7,b:0.3."""
    path = config.data.path
    if Path(path).exists() or "," not in path:
        return {Path(path): 1.0}
    items = [re.fullmatch(r"\s*(.+):((?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)\s*", item) for item in path.split(",")]
    weights = {Path(item[1]): float(item[2]) for item in items if item}
    if len(weights) < len(items) or not all(0 < weight < math.inf for weight in weights.values()):
        reason = "must be a directory, or several different ones with weights above 0, such as data/a:0.7,data/b:0.3"
        raise ConfigError("data.path", path, reason)
    return weights


def _open_path(config: Config, directory: Path, tokenizer: Tokenizer | None) -> Data:
    if not is_prepared(directory):
        what = "is not prepared data: make it with sparse_lm.prepare_data" if directory.exists() else "does not exist"
        raise ConfigError("data.path", config.data.path, f"{directory} {what}")
    data = open_prepared(directory)
    if tokenizer and tokenizer_lib.fingerprint(tokenizer) != data.info["tokenizer_sha256"]:
        other = f"or prepare the text with --tokenizer={config.data.tokenizer}"
        reason = f"must be the one of the data, {data.tokenizer_path}; {other}"
        raise ConfigError("data.tokenizer", config.data.tokenizer, reason)
    if config.seq_len != data.seq_len:
        allowed = f"must be {data.seq_len}, with which {directory} was prepared; or prepare it for {config.seq_len}"
        raise ConfigError("seq_len", config.seq_len, allowed)
    return data


def _open_library(config: Config, tokenizer: Tokenizer | None) -> Data:
    """Opens the standard library's source in windows for this config, or makes them."""
    _check_vocabulary(config, tokenizer_lib.vocabulary_size(tokenizer) if tokenizer else tokenizer_lib.MIN_VOCAB_SIZE)
    corpus = python_library()
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in corpus.paths]
    entries = tokenizer_lib.fingerprint(tokenizer) if tokenizer else config.model.vocab_size
    key = hashlib.sha256(repr((FORMAT, config.seq_len, entries, files)).encode()).hexdigest()
    directory = Path(config.data.cache_dir, f"python-{key[:16]}")
    try:
        return open_prepared(directory)
    except DataError as error:
        _log.info("preparing the source of Python's standard library (config.data.path is empty): %s", error)
        shutil.rmtree(directory, ignore_errors=True)  # what is damaged
    try:
        prepare(
            directory,
            corpus,
            seq_len=config.seq_len,
            tokenizer=tokenizer,
            vocab_size=config.model.vocab_size,
            processes=available_cores(),
        )
    except OSError as error:
        if not is_prepared(directory):  # by another process, meanwhile
            raise ConfigError("data.cache_dir", config.data.cache_dir, f"must be writable: {error}") from error
    return open_prepared(directory)


def _check_vocabulary(config: Config, needed: int) -> None:
    if needed > config.model.vocab_size:
        raise ConfigError(
            "model.vocab_size", config.model.vocab_size, f"must be at least {needed}, the entries of the tokenizer"
        )
