import logging
import resource
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from sparse_lm.errors import WorkdirError
from sparse_lm.training.telemetry.metrics import MetricsWriter, read_metrics
from tests.runs import lines


def events(workdir) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by tag, and starts, over all event files, oldest first. A record is length, CRC, event, CRC."""
    scalars: dict[str, list[tuple[int, float]]] = {}
    for path in sorted((workdir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.HasField("session_log"):
                scalars.setdefault("starts", []).append((event.step, event.session_log.status))
            for value in event.summary.value:
                scalars.setdefault(value.tag, []).append((event.step, value.simple_value))
    return scalars


def test_scalars_vectors_and_text(tmp_path):
    metrics = {"phase": "sparse", "loss": jnp.float32(0.1), "scale": jnp.bfloat16(1.5), "skipped": jnp.int32(2)}
    metrics |= {"mfu": None, "zeros": jnp.asarray([0.25, 0.5, -jnp.inf]), "load": np.ones((2, 2), np.float32)}
    with MetricsWriter(tmp_path) as writer:
        writer.write(3, metrics | {"speed": 7.5})
    expected = {"step": 3, "phase": "sparse", "loss": float(np.float32(0.1)), "scale": 1.5, "skipped": 2, "mfu": None}
    expected |= {"zeros": [0.25, 0.5, None], "load": [[1.0, 1.0], [1.0, 1.0]], "speed": 7.5}
    assert lines(tmp_path) == [expected]
    assert list(lines(tmp_path)[0]) == list(expected)  # in the order given, for people
    plotted = events(tmp_path)
    assert set(plotted) == {"loss", "scale", "skipped", "zeros/0", "zeros/1", "speed", "starts"}
    assert plotted["zeros/1"] == [(3, 0.5)]
    assert plotted["loss"] == [(3, pytest.approx(0.1))]


@pytest.mark.parametrize("damage", [b'{"step": 1, "lo{"step": 2, "loss": 1.0}', b'{"step": 1, "\xff', b"{}"])
def test_damaged_lines_in_the_middle_are_left_out_with_a_warning(tmp_path, damage, caplog):
    whole = [b'{"step": %d, "loss": 1.0}' % step for step in (0, 3, 4)]
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"\n".join([whole[0], damage, *whole[1:], damage, b""]))
    with caplog.at_level(logging.WARNING):
        assert [line["step"] for line in read_metrics(tmp_path)] == [0, 3, 4]
    assert caplog.messages == [f"{file}: line {number} cannot be read and is left out" for number in (2, 5)]
    with MetricsWriter(tmp_path, resume_step=4) as writer:
        writer.write(4, {"loss": 2.0})
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(0, 1.0), (3, 1.0), (4, 2.0)]
    assert events(tmp_path)["starts"] == [(4, SessionLog.START)]  # from where TensorBoard hides what is older


def test_a_disk_with_no_room_is_an_error_of_the_workdir(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"loss": 1.0})
    before, unlimited = lines(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, unlimited[1]))
    try:
        with pytest.raises(WorkdirError, match="cannot be written: File too large"):
            MetricsWriter(tmp_path, resume_step=1)
        with pytest.raises(WorkdirError, match=f"={tmp_path}: metrics.jsonl cannot be written: File too large"):
            writer.write(1, {"loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert lines(tmp_path) == before
