"""The data builder on any documents: no token is lost, repeated or moved, and no document is on both sides."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sparse_lm.data.builder import prepare
from sparse_lm.data.dataset import open_prepared
from sparse_lm.data.holdout import hold_out
from sparse_lm.data.packing import Stream, count_windows, cut
from sparse_lm.data.tokenizer import MIN_VOCAB_SIZE, end_of_text, load_tokenizer
from tests.data.examples import Documents
from tests.fuzz.cases import cases

seeds = st.integers(0, 2**32 - 1)


def all_windows(stream, seq_len):
    """Window w of a stream that goes round: tokens w * seq_len - 1 to (w + 1) * seq_len - 1."""
    starts = np.arange(count_windows(len(stream), seq_len)) * seq_len
    return stream[(starts[:, None] + np.arange(-1, seq_len)) % len(stream)]


@cases(400)
@given(seed=seeds, lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), seq_len=st.integers(1, 12))
def test_windows_of_a_stream_in_files(seed, lengths, seq_len):
    stream = np.random.default_rng(seed).integers(0, 2**16, sum(lengths)).astype(np.uint16)
    files = dict(enumerate(np.split(stream, np.cumsum(lengths)[:-1])))
    count = count_windows(len(stream), seq_len)
    middle = seed % (count + 1)  # written to two shards
    joined = Stream(list(zip(files, lengths, strict=True)))
    windows = [
        batch.copy()
        for spans in (joined.window_spans(0, middle, seq_len), joined.window_spans(middle, count, seq_len))
        for batch in cut((files[span.path][span.start : span.stop] for span in spans), seq_len)
    ]
    np.testing.assert_array_equal(np.concatenate(windows), all_windows(stream, seq_len))


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)


@cases(3)
@given(documents=st.lists(texts, min_size=3, max_size=40, unique=True), seq_len=st.integers(1, 40))
def test_prepared_windows_spell_the_documents(documents, seq_len, tmp_path_factory):
    directory = tmp_path_factory.mktemp("data") / "prepared"
    prepare(directory, Documents(documents), seq_len=seq_len, vocab_size=MIN_VOCAB_SIZE)
    data, split = open_prepared(directory), hold_out(Documents(documents))
    tokenizer = load_tokenizer(data.tokenizer_path)
    for windows, part in ((data.train, split.train), (data.heldout, split.heldout)):
        encoded = [[*tokenizer.encode(document).ids, end_of_text(tokenizer)] for document in part]
        stream = np.concatenate(encoded)
        read = np.stack([windows[index] for index in range(len(windows))])
        np.testing.assert_array_equal(read, all_windows(stream, seq_len))
        assert [tokenizer.decode(ids[:-1], skip_special_tokens=False) for ids in encoded] == list(part)
