import json
import logging
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from sparse_lm.training.telemetry.metrics import MetricsWriter, read_metrics, to_json


def lines(workdir) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def events(workdir) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by tag, over all event files, oldest first. A record is length, CRC, event, CRC."""
    scalars: dict[str, list[tuple[int, float]]] = {}
    for path in sorted((workdir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            for value in event.summary.value:
                scalars.setdefault(value.tag, []).append((event.step, value.simple_value))
    return scalars


def test_scalars_vectors_and_text(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(
            3,
            {
                "phase": "sparse",
                "loss": jnp.float32(0.1),
                "scale": jnp.bfloat16(1.5),
                "skipped": jnp.int32(2),
                "mfu": None,
                "zeros": jnp.asarray([0.25, 0.5]),
                "load": np.ones((2, 2), np.float32),
                "speed": 7.5,
                "shares": {"data/a": 0.25, "b": float("nan")},
            },
        )
    expected = {"step": 3, "phase": "sparse", "loss": float(np.float32(0.1)), "scale": 1.5, "skipped": 2, "mfu": None}
    expected |= {"zeros": [0.25, 0.5], "load": [[1.0, 1.0], [1.0, 1.0]], "speed": 7.5}
    expected["shares"] = {"data/a": 0.25, "b": None}
    assert lines(tmp_path) == [expected]
    assert list(lines(tmp_path)[0]) == list(expected)  # in the order given, for people
    plotted = events(tmp_path)
    assert set(plotted) == {"loss", "scale", "skipped", "zeros/0", "zeros/1", "speed", "shares/data/a"}
    assert plotted["zeros/1"] == [(3, 0.5)]
    assert plotted["loss"] == [(3, pytest.approx(0.1))]


def test_every_line_is_on_disk_at_once(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(3):
            writer.write(step, {"loss": 1.0})
            assert len(lines(tmp_path)) == step + 1


def test_non_finite_numbers_are_null_and_not_plotted(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"loss": jnp.float32(jnp.nan), "norm": float("inf"), "zeros": np.asarray([1.0, -np.inf])})
    assert lines(tmp_path) == [{"step": 0, "loss": None, "norm": None, "zeros": [1.0, None]}]
    assert set(events(tmp_path)) == {"zeros/0"}


def test_resume_leaves_each_step_once(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(10):
            writer.write(step, {"loss": step})
    with MetricsWriter(tmp_path, resume_step=6) as writer:
        assert [line["step"] for line in lines(tmp_path)] == list(range(6))
        for step in range(6, 12):
            writer.write(step, {"loss": -step})
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [
        (step, step if step < 6 else -step) for step in range(12)
    ]


def test_resume_drops_a_last_line_that_a_kill_cut_short(tmp_path):
    whole = '{"step": 0, "loss": 1.0}\n'
    (tmp_path / "metrics.jsonl").write_text(whole + '{"step": 1, "lo')
    with MetricsWriter(tmp_path, resume_step=5) as writer:
        writer.write(5, {"loss": 2.0})
    assert [line["step"] for line in lines(tmp_path)] == [0, 5]


@pytest.mark.parametrize(
    "damage", [b'{"step": 1, "lo{"step": 2, "loss": 1.0}', b"\0\0\0\0", b'{"step": 1, "\xff', b"0", b"{}"]
)
def test_damaged_lines_in_the_middle_are_left_out_with_one_warning(tmp_path, damage, caplog):
    whole = [b'{"step": %d, "loss": 1.0}' % step for step in (0, 3, 4)]
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"\n".join([whole[0], damage, *whole[1:], damage, b""]))
    with caplog.at_level(logging.WARNING):
        assert [line["step"] for line in read_metrics(tmp_path)] == [0, 3, 4]
    assert caplog.messages == [f"{file}: line 2 and 1 more cannot be read and is left out"]
    with MetricsWriter(tmp_path, resume_step=4) as writer:
        writer.write(4, {"loss": 2.0})
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(0, 1.0), (3, 1.0), (4, 2.0)]


def test_resume_replaces_the_file_in_one_rename(tmp_path, monkeypatch):
    """Killed just before the rename, the old lines are all there, and the next resume works."""
    with MetricsWriter(tmp_path) as writer:
        for step in range(4):
            writer.write(step, {"loss": 1.0})

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("pathlib.Path.rename", killed)
        MetricsWriter(tmp_path, resume_step=2)
    assert len(lines(tmp_path)) == 4
    MetricsWriter(tmp_path, resume_step=2).close()
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "tensorboard"}


def test_to_json_is_one_strict_line():
    text = to_json({"step": 3, "loss": np.float64(1.25), "perplexity": float("inf"), "name": "a\nb"})
    assert "\n" not in text
    assert json.loads(text) == {"step": 3, "loss": 1.25, "perplexity": None, "name": "a\nb"}
