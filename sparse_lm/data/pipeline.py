"""Makes batches that are deterministic in (seed, step), with a single index for a position."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from sparse_lm.data.dataset import Data


def train_batches(
    data: Data, *, batch_size: int, seed: int, start_step: int = 0, process_index: int = 0, process_count: int = 1
) -> Iterator[np.ndarray]:
    """Yields shuffled batches without end, each epoch in another order.

    Batch `step` depends on the data, `batch_size`, `seed` and `step` only. It is computed from these, so that starting
    at any step takes no time and no state need be saved. Batches run on over the end of an epoch. The windows of a
    mixture alternate, so that any part of the stream has about the shares of the whole.

    A step has `batch_size` windows over all processes, of which each gets
    [process_index, process_index + 1) * batch_size / process_count.

    Returns:
      An iterator over int32 [batch_size / process_count, seq_len + 1], which raises what `Windows.read` does.
    """
    import grain  # here, since it loads JAX, which a process that prepares data has no use for

    # Indices are shuffled, mixed and batched before anything is read, so that a batch is one read.
    sizes = [len(part.train) for part, _ in data.shares] or [len(data.train)]
    ends = itertools.accumulate(sizes)
    indices = [
        grain.MapDataset.range(end - size, end).shuffle(seed=(seed + number) % 2**32).repeat()
        for number, (end, size) in enumerate(zip(ends, sizes, strict=True))
    ]
    mixed = grain.MapDataset.mix(indices, [share for _, share in data.shares]) if data.shares else indices[0]
    batches = mixed.batch(batch_size // process_count, drop_remainder=True)[process_index::process_count]
    # Reading takes milliseconds, in which a thread of its own leaves the caller free to launch a small model's step.
    read_ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    iterator = iter(batches.map(data.train.read).to_iter_dataset(read_ahead))
    iterator.set_state({"next_index": start_step})
    return iterator


def heldout_batches(data: Data, *, batch_size: int, windows: int = 0) -> Iterator[np.ndarray]:
    """Yields `windows` held-out windows, the same in the same order every time, spread evenly over all of them.

    With `windows` 0, or more than there are, it yields all. Batches are int32 [batch_size, seq_len + 1], the last one
    perhaps with fewer rows. It raises what `Windows.read` does.
    """
    total = len(data.heldout)
    count = min(windows, total) if windows else total
    indices = np.arange(count) * total // count
    for start in range(0, count, batch_size):
        yield data.heldout.read(indices[start : start + batch_size])
