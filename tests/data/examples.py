"""Small corpora, tokenizers and datasets that the data tests make for themselves."""

import json

import numpy as np
from tokenizers import Tokenizer

from sparse_lm.data.tokenizer import END_OF_TEXT, train_tokenizer

WORDS = (
    "def",
    "return",
    "self",
    "value",
    "None",
    "for",
    "range",
    "0",
    "1",
    "=",
    "==",
    ":",
    "(",
    ")",
    "é",
    "漢字",
    "🙂",
)


def make_documents(count: int, seed: int = 0) -> list[str]:
    """Distinct short texts."""
    rng = np.random.default_rng(seed)
    bodies = (" ".join(rng.choice(WORDS, rng.integers(5, 60))) for _ in range(count))
    return [f"# {number}\n{body}\n" for number, body in enumerate(bodies)]


def make_tokenizer(vocab_size: int = 400) -> Tokenizer:
    return train_tokenizer(make_documents(50, seed=1), vocab_size)


def stream_of(documents: list[str], tokenizer: Tokenizer) -> np.ndarray:
    """What the packed windows have to spell, written out without any of the library's packing."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    return np.array([token for text in documents for token in [*tokenizer.encode(text).ids, end]])


def targets_of(windows: np.ndarray) -> np.ndarray:
    """[n, seq_len + 1] windows -> the stream of their targets, after checking that they join up."""
    np.testing.assert_array_equal(windows[1:, 0], windows[:-1, -1])
    return windows[:, 1:].ravel()


def write_jsonl(path, documents: list[str], field: str = "text") -> None:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in documents))
