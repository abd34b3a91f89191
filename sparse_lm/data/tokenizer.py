"""Byte-level BPE: trains one on a corpus, reads published ones, and turns documents into tokens."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from sparse_lm.errors import DataError

END_OF_TEXT = "<|endoftext|>"
# Other families of tokenizers: Llama 3; Llama 1, 2 and T5; Gemma; DeepSeek. Qwen base models use our name.
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")  # noqa: RUF001
MIN_VOCAB_SIZE = 257  # every byte, and the end of text
BATCH_CHARACTERS = 2 * 2**20  # tokenised at one time, on all cores


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE (1508.07909, over bytes as in GPT-2) with an end-of-text token.

    Lossless: decoding what it encodes gives back any text. The same texts give the same tokenizer. The 256 bytes and
    the end of text are among its `vocab_size` entries, at least 257, of which a small corpus may give fewer.
    """
    tokenizer = Tokenizer(models.BPE())
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # What is learnt of a word takes the square of its length. Only learning cuts it.
    by_parts = pre_tokenizers.Split(Regex(r"\S{1000}|\s{1000}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([by_parts, by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = by_bytes
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Reads a tokenizer.json of the `tokenizers` library, such as Llama 3's.

    It encodes whole texts: files published with a model may cut them at its context length, or pad them.

    Raises:
      DataError: the file cannot be read, is not a tokenizer, or has no end-of-text token.
    """
    try:
        tokenizer = Tokenizer.from_str(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"{path} is not a tokenizer.json: {error}") from error
    end_of_text(tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Returns one more than the largest id, special tokens included."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the smallest unsigned type that holds every id: uint16 or uint32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def end_of_text(tokenizer: Tokenizer) -> int:
    """Returns the id that follows every document; raises DataError if no token has one of the usual names."""
    for name in END_OF_TEXT_NAMES:
        if (token := tokenizer.token_to_id(name)) is not None:
            return token
    raise DataError(f"the tokenizer has no end-of-text token: none of {', '.join(END_OF_TEXT_NAMES)}")


def fingerprint(tokenizer: Tokenizer) -> str:
    """Hashes everything that decides how it tokenises; what adds special tokens does not, as none is added."""
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.post_processor = None
    plain.no_truncation()
    plain.no_padding()
    return hashlib.sha256(plain.to_str().encode()).hexdigest()


def bytes_per_token(tokenizer: Tokenizer) -> np.ndarray:
    """Returns int32[vocabulary], the UTF-8 bytes that each id stands for; 0 for special tokens and unused ids.

    A space that a tokenizer puts before each document counts as text: one byte a document too many.
    """
    decoder = json.dumps(json.loads(tokenizer.to_str())["decoder"])
    byte_level = '"ByteLevel"' in decoder
    added = tokenizer.get_added_tokens_decoder()
    lengths = np.zeros(vocabulary_size(tokenizer), np.int32)
    for text, token in tokenizer.get_vocab(with_added_tokens=True).items():
        if token in added:
            lengths[token] = 0 if added[token].special else len(text.encode())
        elif byte_level:
            lengths[token] = len(text)  # the byte-level alphabet spells each byte as one character
        elif re.fullmatch(r"<0x\w\w>", text):
            lengths[token] = 1  # a byte by itself, as SentencePiece spells it
        else:
            lengths[token] = len(text.replace("▁", " ").encode())
    return lengths


def tokenize(documents: Iterable[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yields the token ids of each document, 1-D in `token_dtype`, without special tokens.

    Text that spells a special token is text like any other.
    """
    # A copy: this setting is for corpora, not for whoever else holds the tokenizer.
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.encode_special_tokens = True
    dtype = token_dtype(vocabulary_size(tokenizer))
    for batch in _batches(documents):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield np.array(encoding.ids, dtype)


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Writes a tokenizer.json; raises OSError if it cannot, where the library's own `save` raises a plain Exception."""
    path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
