import base64
import itertools
import re

import hypothesis
import hypothesis.strategies as st
import pytest
from tokenizers import Regex, Tokenizer

from sparse_lm.data import llama3_ranks
from sparse_lm.data import tokenizer as tokenizer_lib
from sparse_lm.data.errors import DataError
from tests.data.examples import make_documents, make_tokenizer

ANY_TEXT = ["The year 2024: it's\r\n  <|end_of_text|> naïve 漢字", "\x00\x7f\n\n\n", "🙂 e\u0301 \ufeff", " " * 300]


def byte_of(letter: str) -> int:
    """The byte that a character of a byte-level vocabulary spells, from GPT-2's description of it."""
    shown = [b for b in range(256) if chr(b).isprintable() and chr(b) != " " and b != 0xAD]
    hidden = [b for b in range(256) if b not in shown]
    return hidden[ord(letter) - 256] if ord(letter) >= 256 else ord(letter)


def trained_ranks() -> dict[bytes, int]:
    """The ranks of a real byte pair encoding: all bytes, then merges in the order of training."""
    vocabulary = make_tokenizer(700).get_vocab()
    spelled = sorted((entry for entry in vocabulary if not entry.startswith("<|")), key=vocabulary.get)
    return {bytes(map(byte_of, entry)): rank for rank, entry in enumerate(spelled)}


RANKS = trained_ranks()


def tiktoken_encode(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """What tiktoken does with a word, as its README has it: join the neighbours of lowest joint rank."""
    if word in ranks:
        return [ranks[word]]
    parts = [bytes([byte]) for byte in word]
    while True:
        joint = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not joint:
            return [ranks[part] for part in parts]
        _, i = min(joint)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def write_ranks(path, ranks: dict[bytes, int]) -> None:
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(entry), rank) for entry, rank in ranks.items()))


@pytest.fixture(scope="module")
def encoder():
    return llama3_ranks.byte_pair_encoder(RANKS, Regex(r"\S+|\s+"))


@hypothesis.settings(deadline=None)
@hypothesis.given(st.text(alphabet="defrtun slv=:01é漢🙂\n", min_size=1, max_size=60))
def test_words_are_encoded_as_tiktoken_does(encoder, text):
    expected = [token for word in re.findall(r"\S+|\s+", text) for token in tiktoken_encode(word.encode(), RANKS)]
    assert encoder.encode(text).ids == expected


def test_real_text_uses_whole_entries(encoder):
    text = "".join(make_documents(20))
    ids = encoder.encode(text).ids
    assert len(ids) < 0.6 * len(text.encode())
    assert encoder.decode(ids) == text


@pytest.fixture(scope="module")
def llama3(tmp_path_factory):
    """From a tokenizer.model with Llama 3's number of entries: real ones, then joints of two and three of them."""
    joints = (b"".join(parts) for count in (2, 3) for parts in itertools.product(RANKS, repeat=count))
    entries = itertools.islice(dict.fromkeys(itertools.islice(itertools.chain(RANKS, joints), 200_000)), 128_000)
    path = tmp_path_factory.mktemp("llama3") / "tokenizer.model"
    write_ranks(path, {entry: rank for rank, entry in enumerate(entries)})
    return tokenizer_lib.load_tokenizer(path)


def test_llama3s_file_becomes_a_tokenizer(llama3):
    assert tokenizer_lib.vocabulary_size(llama3) == 128_256
    named = {"<|begin_of_text|>": 128_000, "<|end_of_text|>": 128_001, "<|start_header_id|>": 128_006}
    named |= {"<|end_header_id|>": 128_007, "<|eot_id|>": 128_009, "<|reserved_special_token_250|>": 128_255}
    assert {name: llama3.token_to_id(name) for name in named} == named
    assert tokenizer_lib.end_of_text(llama3) == 128_001
    lengths = tokenizer_lib.bytes_per_token(llama3)
    for text, tokens in zip(ANY_TEXT, tokenizer_lib.tokenize(ANY_TEXT, llama3), strict=True):
        assert llama3.decode(tokens.tolist(), skip_special_tokens=False) == text
        assert tokens.max() < 128_000
        assert lengths[tokens].sum() == len(text.encode())


def test_it_splits_words_as_llama3_does(llama3):
    words = [word for word, _ in llama3.pre_tokenizer.pre_tokenize_str("It's 12345 words,  naïve\n\n x=1")]
    assert words == ["It", "'s", "Ġ", "123", "45", "Ġwords", ",", "Ġ", "ĠnaÃ¯ve", "ĊĊ", "Ġx", "=", "1"]


def test_it_can_be_saved(encoder, tmp_path):
    encoder.save(str(tmp_path / "tokenizer.json"))
    again = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [again.encode(text).ids for text in ANY_TEXT] == [encoder.encode(text).ids for text in ANY_TEXT]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"IQ== 0\nIg== 1\n", r"has 2 entries, Llama 3's has 128,000: .* name its tokenizer\.json"),
        (b"\n\x0e\n\x05<unk>\x15\x00", r"tokenizer\.model:1 is not an entry in base64 and its rank"),
        (b"IQ== 0\nIg== x\n", r"tokenizer\.model:2 is not an entry"),
        (b"IQ== 0\nIg== 2\n", r"its ranks are not 0\.\.1"),
        (b"IQ== 0\nIQ== 1\n", r"its ranks are not 0\.\.0"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        tokenizer_lib.load_tokenizer(path)
