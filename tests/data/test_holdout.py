import hashlib
import string

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from sparse_lm.data import corpus, holdout
from sparse_lm.data.holdout import sample
from sparse_lm.errors import DataError
from tests.data.examples import held_out, make_documents


def test_a_part_is_decided_by_content_each_is_in_order_and_no_more_than_so_many_bytes_are_held_out(monkeypatch):
    documents = make_documents(5000)
    train, heldout = map(list, held_out(documents)[:2])
    shuffled = list(np.random.default_rng(0).permutation(documents))
    held, again, of_two = (set(held_out(corpus)[1]) for corpus in (documents, shuffled, documents * 2))
    assert held == again and held <= of_two
    assert train == [text for text in documents if text not in held]
    assert heldout == [text for text in documents if text in held]
    assert 0.015 < len(heldout) / len(documents) < 0.025
    size = sum(len(text.encode()) for text in documents)
    monkeypatch.setattr(holdout, "HELDOUT_BYTES", size // 500)
    assert 1 <= len(list(held_out(documents)[1])) < 25  # about 10; 2% are 100


LINES = [f"line {number} of a text\r\n" for number in range(20_000)]


@pytest.mark.parametrize("lines", [200, 3_000, 3_100, 9_000, 20_000])
def test_of_one_file_about_a_fiftieth_is_held_out(lines, tmp_path):
    """Files of up to 64 Ki characters are one document, and larger ones a few, the last of any length."""
    (tmp_path / "a.txt").write_text("".join(LINES[:lines]), newline="")
    train, heldout = map("".join, held_out(corpus.find_files([f"{tmp_path}/*"]))[:2])
    assert sorted((train + heldout).splitlines()) == sorted("".join(LINES[:lines]).splitlines())
    assert 0.01 < len(heldout) / len(train + heldout) < (0.05 if lines > 2_000 else 0.2)


@hypothesis.settings(deadline=None)
@hypothesis.given(st.lists(st.integers(0, 14), min_size=2, max_size=40, unique=True), st.integers(0, 2**32))
def test_few_documents_of_any_sizes_are_held_out_by_size(exponents, seed):
    letters = [*string.ascii_letters, "\n"]
    documents = ["".join(np.random.default_rng([seed, e]).choice(letters, int(8 * 1.8**e))) for e in exponents]
    documents *= 1 + seed % 2
    train, heldout = (sum(map(len, part)) for part in held_out(documents)[:2])
    size = sum(map(len, documents))
    assert train + heldout == size
    assert 0 < heldout <= size / 2
    if size > 50_000:  # or pieces are not a fiftieth
        assert 0.01 * size <= heldout <= 0.1 * size


def test_documents_of_lowest_rank_are_held_out_up_to_a_twentieth_of_the_text():
    ranked = {text: hashlib.sha256(text.encode()).digest() for text in map(str, range(10_000, 12_000))}
    documents = [text for text, digest in ranked.items() if digest[0] < 5]  # about 40, all under 2%
    assert 0.04 < len(list(held_out(documents)[1])) / len(documents) < 0.09


def test_a_document_that_comes_again_and_again_is_trained_on():
    for number in range(20):
        many, one = f"many {number}", f"one {number}"
        train, heldout, _ = held_out([many] * 99 + [one])
        assert (set(train), list(heldout)) == ({many}, [one])


def test_corpora_with_nothing_to_hold_out_are_refused():
    with pytest.raises(DataError, match="empty"):
        held_out([])
    with pytest.raises(DataError, match="single short document"):
        held_out(["x"])


def test_a_sample_is_about_as_large_as_asked_and_never_held_out():
    train, _, found = held_out(make_documents(2000))
    part = list(sample(train, 0.25))
    assert 0.2 < sum(len(text.encode()) for text in part) / found.size < 0.3
    assert set(part) <= set(train)
    assert list(sample(train, 1.0)) == list(train)
