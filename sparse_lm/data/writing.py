"""The last stage of a preparation: writes windows of tokens to ArrayRecord files."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from array_record.python import array_record_module

from sparse_lm.data import packing
from sparse_lm.data.packing import Span
from sparse_lm.data.tasks import Report
from sparse_lm.data.tokenising import TokenisedPart
from sparse_lm.data.workspace import Workspace
from sparse_lm.files import replacing

DATASET = "packed_text"
SHARD_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}"  # for TFDS to find the files by


@dataclasses.dataclass(frozen=True)
class WriteTask:
    """Writes windows to an ArrayRecord file.

    The result counts windows and the bytes of their records.
    """

    path: Path
    shard: Path
    spans: list[Span]
    seq_len: int
    dtype: np.dtype

    def run(self, report: Report) -> dict[str, Any]:
        features = window_features(self.seq_len, self.dtype)
        pieces = (span.read(self.dtype) for span in self.spans)
        counts = {"windows": 0, "bytes": 0}
        with replacing(self.shard) as partial:
            writer = array_record_module.ArrayRecordWriter(str(partial), "group_size:1")
            for windows in packing.cut(pieces, self.seq_len):
                for window in windows:
                    record = features.serialize_example({"tokens": window})
                    writer.write(record)
                    counts["bytes"] += len(record)
                counts["windows"] += len(windows)
            writer.close()
        report({"windows": counts["windows"], "tokens": counts["windows"] * self.seq_len})
        return counts


def write(
    parts: dict[str, TokenisedPart],
    folder: Path,
    *,
    seq_len: int,
    dtype: np.dtype,
    shard_windows: int,
    workspace: Workspace,
) -> dict[str, list[dict[str, Any]]]:
    """Writes the windows of each part to shards in `folder`.

    Args:
      parts: by name.
      folder: where the shards are, those of an earlier run among them.
      seq_len: targets of a window.
      dtype: of the tokens.
      shard_windows: at most so many in a file.
      workspace: for the results.

    Returns:
      For each part the windows and bytes of its shards, whose files are named by `shard_name`.
    """
    if not folder.exists():  # or an earlier run has moved it to its place, and was killed before it could say so
        workspace.forget("shards")
    tasks: dict[str, list[WriteTask]] = {}
    total = 0
    for name, part in parts.items():
        stream = packing.Stream(part.files)
        windows = packing.count_windows(len(stream), seq_len)
        total += windows
        tasks[name] = []
        for number, first in enumerate(range(0, windows, shard_windows)):
            shard = folder / shard_name(name, number)
            spans = stream.window_spans(first, min(first + shard_windows, windows), seq_len)
            path = workspace.path("shards", shard, seq_len, spans)
            tasks[name].append(WriteTask(path, shard, spans, seq_len, dtype))
    everything = [task for part in tasks.values() for task in part]
    results = iter(workspace.run("writing windows", everything, "windows", total))
    return {name: list(itertools.islice(results, len(part))) for name, part in tasks.items()}


def shard_name(part: str, number: int) -> str:
    """File name of a shard, as `SHARD_TEMPLATE` has it."""
    return f"{DATASET}-{part}.array_record-{number:05d}"


def window_features(seq_len: int, dtype: np.dtype) -> tfds.features.FeaturesDict:
    """What a record holds."""
    return tfds.features.FeaturesDict(
        {"tokens": tfds.features.Tensor(shape=(seq_len + 1,), dtype=dtype, encoding="bytes")}
    )
