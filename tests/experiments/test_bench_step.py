"""Times of steps are those of whole steps, and what a step computes and communicates is counted with its parts."""

import json
import re
import types

import jax
import pytest

from configs import tiny
from experiments import result_files, timing
from experiments.bench import step, step_parts
from experiments.bench.hlo_collectives import collectives
from tests import small
from tests.clock import Clock

STEP = 0.02  # seconds


class Loss:
    """A device's result that is there from `ready` on."""

    def __init__(self, clock, ready):
        self.clock, self.ready = clock, ready

    def block_until_ready(self):
        self.clock.now = max(self.clock.now, self.ready)
        return self

    def __float__(self):
        return 2.0


def ahead(clock, end_of_last):
    """A step whose dispatch returns at once; the device takes them one after the other."""
    end = max(end_of_last, clock.now) + STEP
    return end, {"loss": Loss(clock, end)}


def waiting(clock, end_of_last):
    """A step whose dispatch returns when the device has done half of it."""
    end, metrics = ahead(clock, end_of_last)
    clock.now = max(clock.now, end - 0.5 * STEP)
    return end, metrics


@pytest.mark.parametrize("begin", [ahead, waiting])
def test_every_time_is_of_a_whole_step(begin, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=clock))
    _, seconds = timing.time_steps(lambda end, _: begin(clock, end), 0.0, ["a", "b"], warmup=1, timed=4)
    assert seconds == pytest.approx(4 * [STEP])


def test_a_loss_that_is_not_finite_is_an_error():
    with pytest.raises(RuntimeError, match="the loss is nan"):
        timing.time_steps(lambda state, batch: (state, {"loss": float("nan")}), None, [None], warmup=0, timed=1)


def test_results_are_written_where_no_directory_is_yet(tmp_path, monkeypatch):
    """After hours of measuring."""
    path = tmp_path / "runs" / "new.json"
    monkeypatch.setattr(result_files, "OUTPUT", types.SimpleNamespace(value=path))
    result_files.write_results(rows=[1])
    assert json.loads(path.read_text()).items() >= {"rows": [1], "device": "cpu"}.items()


@pytest.mark.long
def test_products_belong_to_parts_that_have_some():
    config = small.config("slices")
    trainer, _ = small.compiled(config)
    lowered = trainer.steps["sparse"].lower(trainer.abstract_state(), small.windows(config))
    hlo = lowered.compile(compiler_options={"xla_backend_optimization_level": 0}).as_text()
    products = re.findall(r"^ +(?:ROOT )?%?([\w.\-]+) = .* dot\(", hlo, re.M)
    kernels = [step_parts.Kernel(name, name, 1.0) for name in products]
    routing = {"FFN routing", "FFN, other"}  # which of them the product with the centroids is depends on its scope
    parts = set(step_parts.by_part(kernels, hlo))
    assert parts - routing == {"FFN products", "attention projections", "attention scores", "loss"}
    assert parts & routing


def test_kernels_of_several_devices_and_steps_are_timed_by_device_and_step():
    stream = """lines { name: "Stream #13(Compute)" events { metadata_id: 1 duration_ps: 6000000000 } }"""
    names = """event_metadata { key: 1 value { id: 1 name: "gemm" } }"""
    planes = "".join(f'planes {{ id: {n} name: "/device:GPU:{n}" {stream} {names} }}\n' for n in range(2))
    profile = jax.profiler.ProfileData.from_serialized_xspace(
        jax.profiler.ProfileData.text_proto_to_serialized_xspace(planes)
    )
    assert step_parts.kernels_of(profile, steps=3) == 2 * [step_parts.Kernel("gemm", "", 1.0)]


def test_layers_that_the_configuration_keeps_dense_are_dense():
    assert step._with_recipe(tiny.get_config(), "slices").sparsity.dense_layers == 1


PROGRAM = """\
HloModule step

%layer (p: (s32[])) -> (s32[]) {
  %gather = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%a), replica_groups=[1,4]<=[4], dimensions={0}
  %several = ((bf16[4], f32[2]), (bf16[16], f32[8])) all-gather-start(%a, %b), replica_groups=[1,4]<=[4], dimensions={0}
  %scatter = ((bf16[16]), bf16[4]) reduce-scatter-start(%c), replica_groups=[1,4]<=[4], dimensions={0}
}

%microbatch (p: (s32[])) -> (s32[]) {
  %layers = (s32[]) while(%t), condition=%c1, body=%layer, backend_config={"known_trip_count":{"n":"3"}}
  %sum = (f32[4]{0}, f32[2]{0}) all-reduce-start(%a, %b), replica_groups=[1,4]<=[4], to_apply=%add
}

ENTRY %main (p: (s32[])) -> (s32[]) {
  %steps = (s32[]) while(%t), condition=%c2, body=%microbatch, backend_config={"known_trip_count":{"n":"2"}}
  %last = pred[8]{0} all-gather(%d), replica_groups=[1,4]<=[4], dimensions={0}
}
"""


def test_bytes_are_of_results_and_loops_in_loops_take_all_their_turns():
    assert [(c.kind, c.bytes, c.times) for c in collectives(PROGRAM)] == [
        ("all-gather", 16 * 8 * 2, 6),
        ("all-gather", 16 * 2 + 8 * 4, 6),
        ("reduce-scatter", 4 * 2, 6),
        ("all-reduce", 6 * 4, 2),
        ("all-gather", 8, 1),
    ]
