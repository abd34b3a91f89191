import itertools
from pathlib import Path

import numpy as np
import pytest

from sparse_lm.data.dataset import Data, Windows, mix
from sparse_lm.data.pipeline import heldout_batches, train_batches

SEQ_LEN = 3


class Records(list):
    def __getitems__(self, indices):
        return [{"tokens": np.full(SEQ_LEN + 1, self[index], np.uint16)} for index in indices]


def make_data(train: int = 50, heldout: int = 23, offset: int = 0) -> Data:
    """Window i is (offset + i) four times."""
    counts = dict(train=train, heldout=heldout)
    windows = {split: Windows(Records(range(offset, offset + count)), Path()) for split, count in counts.items()}
    info = {"corpus_sha256": str(offset), "splits": {"train": {"tokens": train}}}
    return Data(Path(str(offset)), Path(), 100, SEQ_LEN, bytes_per_token=np.ones(100, np.int32), info=info, **windows)


PARTS = [make_data(size, size, 1000 * n) for n, size in enumerate((50, 7, 20))]  # windows from 0, 1000 and 2000 on
DATA = {"one": make_data(), "mixture": mix("a mixture", PARTS, (2.0, 0.5, 1.5))}


def take(count: int, data: str = "one", **kwargs) -> np.ndarray:
    """[count, batch] of the windows in the first batches."""
    arguments = dict(batch_size=8, seed=0) | kwargs
    return np.stack(list(itertools.islice(train_batches(DATA[data], **arguments), count)))[:, :, 0]


@pytest.mark.parametrize("data", DATA)
def test_the_stream_is_a_function_of_the_seed_and_goes_on_at_any_step(data):
    stream = take(20, data)
    np.testing.assert_array_equal(take(20, data), stream)
    assert (take(20, data, seed=1) != stream).any()
    np.testing.assert_array_equal(take(13, data, start_step=7), stream[7:])
    assert take(1, data, seed=2**40 + 5, start_step=10**15).shape == (1, 8)  # reached at once


def test_every_epoch_has_every_window_once_in_another_order():
    epochs = take(25).ravel()[:200].reshape(4, 50)
    for epoch in epochs:
        assert sorted(epoch) == list(range(50))
    assert len({tuple(epoch) for epoch in epochs} | {tuple(range(50))}) == 5
    assert np.bincount(take(1, batch_size=120)[0], minlength=50).min() == 2  # a batch may be larger than the data


def test_a_mixture_has_its_shares_in_every_stretch_and_its_parts_whole_epochs():
    stream = take(100, "mixture").ravel()
    parts = [stream[stream // 1000 == number] for number in range(3)]
    for part, size in zip(parts, (50, 7, 20), strict=True):
        first, second = part[:size] % 1000, part[size : 2 * size] % 1000
        assert sorted(first) == sorted(second) == list(range(size))
        assert (first != second).any()
    for stretch in stream.reshape(-1, 80) // 1000:
        np.testing.assert_allclose(np.bincount(stretch, minlength=3) / 80, [0.5, 0.125, 0.375], atol=0.03)
    twins = [mix("twins", [make_data(), make_data(offset=1000)], weights) for weights in ((1, 1), (2, 2), (1, 2))]
    stream = next(train_batches(twins[0], batch_size=100, seed=0))[:, 0]
    assert (stream[stream < 1000] != stream[stream >= 1000] - 1000).any()  # each has an order of its own
    one, same, other = (data.info["corpus_sha256"] for data in twins)  # which tells a run if it has its text again
    assert one == same != other


def test_a_mixture_holds_out_windows_in_its_shares():
    heldout = np.concatenate(list(heldout_batches(DATA["mixture"], batch_size=4)))[:, 0]
    assert np.bincount(heldout // 1000).tolist() == [26, 6, 20]  # all 20 of the part that has fewest for its share
    assert len(set(heldout)) == 52
    assert heldout[25] > 45
    few = mix("few", [make_data(heldout=3), make_data(heldout=2)], (0.7, 0.3))
    assert len(few.heldout) == 3 + 1  # all 3, though 3 / 0.7 * 0.7 is below 3


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("processes", [2, 8])
def test_processes_read_the_rows_of_one_batch(data, processes):
    parts = [take(15, data, start_step=5, process_index=index, process_count=processes) for index in range(processes)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), take(15, data, start_step=5))


@pytest.mark.parametrize(("windows", "count"), [(10, 10), (0, 23), (100, 23), (1, 1)])
def test_held_out_windows_are_the_same_every_time_and_spread_over_all(windows, count):
    batches = list(heldout_batches(make_data(), batch_size=4, windows=windows))
    assert [len(batch) for batch in batches] == [4] * (count // 4) + [count % 4] * (count % 4 > 0)
    assert np.concatenate(batches)[:, 0].tolist() == [number * 23 // count for number in range(count)]
