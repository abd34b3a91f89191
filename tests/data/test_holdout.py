import numpy as np
import pytest

from sparse_lm.data import holdout
from sparse_lm.data.errors import DataError
from sparse_lm.data.holdout import already_split, hold_out
from tests.data.examples import make_documents


def test_every_document_is_in_exactly_one_part_in_order():
    documents = make_documents(5000)
    split = hold_out(documents)
    train, heldout = list(split.train), list(split.heldout)
    assert not set(train) & set(heldout)
    held = set(heldout)
    assert train == [text for text in documents if text not in held]
    assert heldout == [text for text in documents if text in held]
    assert 0.01 < len(heldout) / len(documents) < 0.03


def test_no_more_than_so_many_bytes_are_held_out(monkeypatch):
    documents = make_documents(5000)
    size = sum(len(text.encode()) for text in documents)
    monkeypatch.setattr(holdout, "HELDOUT_BYTES", size // 500)
    assert 1 <= len(list(hold_out(documents).heldout)) < 25  # about 10; 2% are 100


def test_a_documents_part_depends_on_its_content_alone():
    documents = make_documents(3000)
    shuffled = list(np.random.default_rng(0).permutation(documents))
    assert set(hold_out(documents).heldout) == set(hold_out(shuffled).heldout)
    assert set(hold_out(documents).heldout) <= set(hold_out(documents * 2).heldout)


def test_copies_of_a_document_stay_together():
    split = hold_out(make_documents(300) * 3)
    assert not set(split.train) & set(split.heldout)


@pytest.mark.parametrize("count", [2, 3, 10])
def test_neither_part_is_empty(count):
    for seed in range(20):
        split = hold_out(make_documents(count, seed))
        assert len(list(split.heldout)) == 1
        assert len(list(split.train)) == count - 1


def test_a_single_document_is_cut():
    document = "".join(f"line {number}\r\n" for number in range(200))
    split = hold_out([document])
    train, heldout = list(split.train), list(split.heldout)
    assert sorted("".join(train + heldout).splitlines()) == sorted(document.splitlines())
    assert 0 < len("".join(heldout)) < 0.2 * len(document)


def test_token_documents_are_held_out_by_content_not_by_dtype():
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 1000, 20) for _ in range(500)]
    wide = [tokens.tolist() for tokens in hold_out(documents).heldout]
    narrow = [tokens.tolist() for tokens in hold_out([tokens.astype(np.uint16) for tokens in documents]).heldout]
    assert wide == narrow
    assert len(wide) > 0


def test_corpora_with_nothing_to_hold_out_are_refused():
    with pytest.raises(DataError, match="empty"):
        hold_out([])
    with pytest.raises(DataError, match="single short document"):
        hold_out(["x"])
    with pytest.raises(DataError, match="empty"):
        already_split(["text"], [])


def test_the_hash_is_of_content_and_order():
    documents = make_documents(10)
    assert hold_out(documents).sha256 == hold_out(list(documents)).sha256
    assert hold_out(documents).sha256 != hold_out(documents[::-1]).sha256
    assert hold_out(documents).sha256 != hold_out([*documents[:-1], "other"]).sha256


def test_a_sample_is_about_as_large_as_asked_and_never_held_out():
    split = hold_out(make_documents(2000))
    sample = list(split.sample(split.size // 4))
    assert 0.2 < sum(len(text.encode()) for text in sample) / split.size < 0.3
    assert set(sample) <= set(split.train)
    assert list(split.sample(2 * split.size)) == list(split.train)


def test_a_sample_may_be_a_smaller_share_than_what_is_held_out():
    split = hold_out(make_documents(5000))
    assert 25 < len(list(split.sample(split.size // 100))) < 90  # about 50
