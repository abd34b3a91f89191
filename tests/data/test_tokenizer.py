import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing

from sparse_lm.data import tokenizer as tokenizer_lib
from sparse_lm.errors import DataError
from tests.data.examples import make_documents, make_tokenizer

TOKENIZER = make_tokenizer()


@hypothesis.settings(deadline=None)
@hypothesis.given(st.text(min_size=1))
@hypothesis.example("\x00\x01\x7f \r\n\t  \n")
@hypothesis.example("e\u0301 \u200d \u202e \ufeff \ufffd \U0010ffff 👩\u200d👩\u200d👧 漢字 ﷽")
@hypothesis.example("<|endoftext|> is text here, and so is <|endoftext|>")
@hypothesis.example(" " * 300)
def test_any_text_round_trips_and_its_bytes_are_counted(text):
    (tokens,) = tokenizer_lib.tokenize([text], TOKENIZER)
    assert TOKENIZER.decode(tokens.tolist(), skip_special_tokens=False) == text
    assert tokenizer_lib.end_of_text(TOKENIZER) not in tokens
    assert tokenizer_lib.bytes_per_token(TOKENIZER)[tokens].sum() == len(text.encode())


def test_training_is_deterministic_and_reaches_its_size():
    again = make_tokenizer()
    assert tokenizer_lib.fingerprint(again) == tokenizer_lib.fingerprint(TOKENIZER)
    assert tokenizer_lib.vocabulary_size(again) <= 400
    assert tokenizer_lib.vocabulary_size(tokenizer_lib.train_tokenizer(["ab " * 9], 257)) == 257


@pytest.mark.timeout(20)
def test_a_word_of_any_length_is_learnt_from_in_parts():
    word = "".join(np.random.default_rng(0).choice([*"ACGT"], 500_000))
    tokenizer = tokenizer_lib.train_tokenizer([word, " " * 500_000 + "a", "a text of words"], vocab_size=600)
    assert tokenizer.decode(tokenizer.encode(word).ids) == word and len(tokenizer.encode(word).ids) < len(word) / 3


def test_truncation_padding_and_what_adds_tokens_in_a_tokenizer_file_are_ignored(tmp_path):
    documents = make_documents(5)
    expected = [tokens.tolist() for tokens in tokenizer_lib.tokenize(documents, TOKENIZER)]
    limited = Tokenizer.from_str(TOKENIZER.to_str())
    limited.enable_truncation(4)
    limited.enable_padding(length=500)
    limited.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    assert tokenizer_lib.fingerprint(limited) == tokenizer_lib.fingerprint(TOKENIZER)
    limited.save(str(tmp_path / "limited.json"))
    loaded = tokenizer_lib.load_tokenizer(tmp_path / "limited.json")
    assert [tokens.tolist() for tokens in tokenizer_lib.tokenize(documents, loaded)] == expected
    assert [loaded.encode(text, add_special_tokens=False).ids for text in documents] == expected


def test_files_that_are_no_tokenizer_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*missing\.json: No such file or directory$"):
        tokenizer_lib.load_tokenizer(tmp_path / "missing.json")
    path = tmp_path / "tokenizer.json"
    path.write_text('{"half": ')
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        tokenizer_lib.load_tokenizer(path)
    Tokenizer(models.BPE({"a": 0}, [])).save(str(path))
    with pytest.raises(DataError, match="no end-of-text token"):
        tokenizer_lib.load_tokenizer(path)


def test_bytes_of_a_sentencepiece_vocabulary():
    tokenizer = Tokenizer(models.BPE({"</s>": 0, "<0x0A>": 1, "▁the": 2, "é": 3}, [], byte_fallback=True))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.add_tokens(["<é>"])  # which is text
    assert tokenizer_lib.bytes_per_token(tokenizer).tolist() == [0, 1, 4, 2, 4]


@pytest.mark.parametrize(("entries", "dtype"), [(257, np.uint16), (65_536, np.uint16), (65_537, np.uint32)])
def test_the_dtype_is_the_smallest_that_holds_every_id(entries, dtype):
    assert tokenizer_lib.token_dtype(entries) == dtype
