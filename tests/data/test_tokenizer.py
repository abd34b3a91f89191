import itertools
import json

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from sparse_lm.data import tokenizer as tokenizer_lib
from sparse_lm.data.errors import DataError
from tests.data.examples import make_documents, make_tokenizer

TOKENIZER = make_tokenizer()
ODD_TEXTS = [
    "\x00\x01\x7f \r\n\t  \n",
    "e\u0301 \u200d \u202e \ufeff \ufffd \U0010ffff",
    "👩\u200d👩\u200d👧 漢字 ﷽",
    "<|endoftext|> is text here, and so is <|endoftext|>",
    " " * 300,
]
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def decoded(tokens) -> str:
    return TOKENIZER.decode(tokens.tolist(), skip_special_tokens=False)


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_odd_text_round_trips(text):
    (tokens,) = tokenizer_lib.tokenize([text], TOKENIZER)
    assert decoded(tokens) == text
    assert tokenizer_lib.end_of_text(TOKENIZER) not in tokens


@hypothesis.settings(deadline=None)
@hypothesis.given(st.text(min_size=1))
def test_any_text_round_trips_and_its_bytes_are_counted(text):
    (tokens,) = tokenizer_lib.tokenize([text], TOKENIZER)
    assert decoded(tokens) == text
    assert tokenizer_lib.bytes_per_token(TOKENIZER)[tokens].sum() == len(text.encode())


def test_training_is_deterministic_and_reaches_its_size():
    again = make_tokenizer()
    assert tokenizer_lib.fingerprint(again) == tokenizer_lib.fingerprint(TOKENIZER)
    assert tokenizer_lib.vocabulary_size(again) <= 400
    assert tokenizer_lib.vocabulary_size(tokenizer_lib.train_tokenizer(["ab " * 9], 257)) == 257
    with pytest.raises(DataError, match="vocab_size = 256: must be at least 257"):
        tokenizer_lib.train_tokenizer(["text"], 256)


def test_fingerprint_is_of_the_tokens_alone():
    same = Tokenizer.from_str(TOKENIZER.to_str())
    same.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer_lib.end_of_text(TOKENIZER))]
    )
    same.enable_truncation(7)
    assert tokenizer_lib.fingerprint(same) == tokenizer_lib.fingerprint(TOKENIZER)
    other = Tokenizer.from_str(TOKENIZER.to_str())
    other.add_tokens(["def main"])
    assert tokenizer_lib.fingerprint(other) != tokenizer_lib.fingerprint(TOKENIZER)


def test_batches_do_not_change_tokens(monkeypatch):
    documents = make_documents(60)
    whole = list(tokenizer_lib.tokenize(documents, TOKENIZER))
    monkeypatch.setattr(tokenizer_lib, "BATCH_CHARACTERS", 100)
    for one, other in zip(whole, tokenizer_lib.tokenize(documents, TOKENIZER), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == np.uint16


def test_tokenizing_leaves_the_tokenizer_as_it_was():
    list(tokenizer_lib.tokenize(["<|endoftext|>"], TOKENIZER))
    assert TOKENIZER.encode("<|endoftext|>").ids == [tokenizer_lib.end_of_text(TOKENIZER)]


def test_truncation_and_padding_of_a_tokenizer_file_are_ignored():
    documents = make_documents(5)
    expected = [tokens.tolist() for tokens in tokenizer_lib.tokenize(documents, TOKENIZER)]
    limited = Tokenizer.from_str(TOKENIZER.to_str())
    limited.enable_truncation(4)
    limited.enable_padding(length=500)
    assert [tokens.tolist() for tokens in tokenizer_lib.tokenize(documents, limited)] == expected


@pytest.fixture(scope="module")
def llama3_shaped(tmp_path_factory):
    """Llama 3's structure and number of entries, with invented merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = itertools.product(alphabet, alphabet)
    triples = ((a + b, c) for a, b, c in itertools.product(alphabet, alphabet, alphabet))
    merges = list(itertools.islice(itertools.chain(pairs, triples), 128_000 - 256))
    entries = [*alphabet, *(left + right for left, right in merges)]
    names = ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(254))]
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    begin = {"SpecialToken": {"id": names[0], "type_id": 0}}
    single = [begin, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {names[0]: {"id": names[0], "ids": [128_000], "tokens": [names[0]]}},
    }
    split = {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 128_000 + i, "content": name, **flags} for i, name in enumerate(names)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": {"type": "Sequence", "processors": [byte_level, template]},
        "decoder": {**byte_level, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": {entry: token for token, entry in enumerate(entries)},
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }
    path = tmp_path_factory.mktemp("llama3") / "tokenizer.json"
    path.write_text(json.dumps(tokenizer))
    return path


def test_a_tokenizer_of_llama3s_shape_loads(llama3_shaped):
    tokenizer = tokenizer_lib.load_tokenizer(llama3_shaped)
    assert tokenizer_lib.vocabulary_size(tokenizer) == 128_256
    assert tokenizer_lib.end_of_text(tokenizer) == 128_001
    text = "The year 2024: it's\r\n  <|end_of_text|> naïve 漢字"
    (tokens,) = tokenizer_lib.tokenize([text], tokenizer)
    assert tokens.dtype == np.uint32
    assert tokens.max() < 128_000  # neither a beginning of text nor a special token that the text spells
    assert tokenizer.decode(tokens.tolist(), skip_special_tokens=False) == text
    lengths = tokenizer_lib.bytes_per_token(tokenizer)
    assert lengths[tokens].sum() == len(text.encode())
    assert not lengths[128_000:].any()


def test_files_that_are_no_tokenizer_are_refused(tmp_path):
    with pytest.raises(DataError, match="no tokenizer file"):
        tokenizer_lib.load_tokenizer(tmp_path / "missing.json")
    path = tmp_path / "tokenizer.json"
    path.write_text('{"half": ')
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        tokenizer_lib.load_tokenizer(path)
    Tokenizer(models.BPE({"a": 0}, [])).save(str(path))
    with pytest.raises(DataError, match="no end-of-text token"):
        tokenizer_lib.load_tokenizer(path)


def test_bytes_of_a_sentencepiece_vocabulary():
    vocab = {"</s>": 0, "<0x0A>": 1, "▁the": 2, "é": 3}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.add_special_tokens(["</s>"])
    assert tokenizer_lib.bytes_per_token(tokenizer).tolist() == [0, 1, 4, 2]


@pytest.mark.parametrize(("entries", "dtype"), [(257, np.uint16), (65_536, np.uint16), (65_537, np.uint32)])
def test_the_dtype_is_the_smallest_that_holds_every_id(entries, dtype):
    assert tokenizer_lib.token_dtype(entries) == dtype


@pytest.mark.parametrize("bad", [-1, 400])
def test_tokens_that_the_tokenizer_lacks_are_refused(bad):
    size = tokenizer_lib.vocabulary_size(TOKENIZER)
    good = np.array([0, size - 1], np.int64)
    (passed,) = tokenizer_lib.tokenize([good], TOKENIZER)
    np.testing.assert_array_equal(passed, good)
    with pytest.raises(DataError, match=f"has token {bad}, the tokenizer has ids 0..{size - 1}"):
        list(tokenizer_lib.tokenize([good, np.array([0, bad])], TOKENIZER))
