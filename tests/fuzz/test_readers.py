"""Texts of any bytes: read as what was written, or refused by the error that is documented; windows of any tokens."""

import json
import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sparse_lm.data.corpus import TextFiles
from sparse_lm.data.packing import window
from sparse_lm.errors import DataError
from tests.data.test_corpus import COMPRESS
from tests.fuzz.cases import cases

seeds = st.integers(0, 2**32 - 1)


def damaged(content: bytes, seed: int) -> bytes:
    """A few bytes changed, cut out, doubled or added, or the end cut off."""
    rng = random.Random(seed)
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(content) + 1)
        stop = min(len(content), start + rng.choice([0, 1, 1, 2, 8, 64]))
        middle = rng.choice([b"", rng.randbytes(stop - start), content[start:stop] * 2, rng.randbytes(2)])
        rest = b"" if rng.random() < 0.2 else content[stop:]
        content = content[:start] + middle + rest
    return content


TEXTS = ["", "def f():\n    return 0\n", "\u00e9\u4e2d\U0001f600", '"\\ud800"', "x" * 300, "\r\n\x00\x0b"]


@cases(300)
@given(seed=seeds, compression=st.sampled_from(sorted(COMPRESS)), kind=st.sampled_from([".txt", ".jsonl"]))
def test_corpus(seed, compression, kind, tmp_path_factory):
    """Texts are valid Unicode, whatever the bytes; a damaged archive or line is refused."""
    path = tmp_path_factory.getbasetemp() / f"text{kind}{compression}"
    lines = [json.dumps({"text": text}) for text in TEXTS]
    plain = "\n".join(lines if kind == ".jsonl" else TEXTS).encode()
    rng = random.Random(seed)
    pack = COMPRESS[compression]
    content = damaged(pack(plain), seed) if rng.random() < 0.5 else pack(damaged(plain, seed))
    path.write_bytes(content)
    try:
        documents = list(TextFiles((path,)))
    except DataError as error:
        assert str(path) in str(error)
        return
    assert all(documents)
    assert all(document.encode("utf-8") for document in documents)
    if kind == ".txt" and not compression:
        assert "".join(documents) == content.decode("utf-8", "replace")


@cases(400)
@given(length=st.integers(1, 40), seq_len=st.integers(1, 60))
def test_windows_of_a_stream(length, seq_len):
    """Window w of a stream that goes round is tokens w * seq_len - 1 to (w + 1) * seq_len - 1."""
    tokens = np.random.default_rng(length).integers(0, 2**16, length).astype(np.uint16)
    for number in range(-(-length // seq_len)):
        found = window(tokens, number, seq_len)
        expected = [tokens[(number * seq_len + step) % length] for step in range(-1, seq_len)]
        assert found.dtype == np.uint16 and found.tolist() == expected
