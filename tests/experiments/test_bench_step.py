"""Times of steps are those of whole steps, and every product of a step is counted with its part of the model."""

import re
import time

import pytest

from experiments.bench import step_parts
from experiments.timing import time_steps
from tests import small

STEP = 0.02  # seconds


class Loss:
    """A device's result that is there from `ready` on."""

    def __init__(self, ready):
        self.ready = ready

    def block_until_ready(self):
        time.sleep(max(0.0, self.ready - time.perf_counter()))
        return self

    def __float__(self):
        self.block_until_ready()
        return 2.0


def ahead(end_of_last, batch):
    """A step whose dispatch returns at once; the device takes them one after the other."""
    end = max(end_of_last, time.perf_counter()) + STEP
    return end, {"loss": Loss(end)}


def waiting(end_of_last, batch):
    """A step whose dispatch returns when the device has done half of it."""
    end, metrics = ahead(end_of_last, batch)
    time.sleep(max(0.0, end - 0.5 * STEP - time.perf_counter()))
    return end, metrics


@pytest.mark.parametrize("step", [ahead, waiting])
def test_every_time_is_of_a_whole_step(step):
    _, seconds = time_steps(step, 0.0, ["a", "b"], warmup=1, timed=4)
    assert len(seconds) == 4
    assert sum(seconds) == pytest.approx(4 * STEP, rel=0.3)
    assert min(seconds) > 0.5 * STEP


def test_a_loss_that_is_not_finite_is_an_error():
    with pytest.raises(RuntimeError, match="the loss is nan"):
        time_steps(lambda state, batch: (state, {"loss": float("nan")}), None, [None], warmup=0, timed=1)


@pytest.mark.long
def test_products_belong_to_parts_that_have_some():
    config = small.config("slices")
    trainer, _ = small.compiled(config)
    lowered = trainer.step("sparse").lower(trainer.abstract_state(), small.windows(config))
    hlo = lowered.compile(compiler_options={"xla_backend_optimization_level": 0}).as_text()
    products = re.findall(r"^ +(?:ROOT )?%?([\w.\-]+) = .* dot\(", hlo, re.M)
    kernels = [step_parts.Kernel(name, name, 1.0) for name in products]
    routing = {"FFN routing", "FFN, other"}  # which of them the product with the centroids is depends on its scope
    parts = set(step_parts.by_part(kernels, hlo))
    assert parts - routing == {"FFN products", "attention projections", "attention scores", "loss"}
    assert parts & routing


def test_kernels_of_the_hidden_layer_are_known_by_name():
    hlo = '  %a.1 = f32[] call(), metadata={op_name="jit(step)/feed_forward/pallas_call"}\n'
    kernels = [step_parts.Kernel(name, "a.1", 1.0) for name in ("squared_relu_gradients_kernel", "fusion_2")]
    assert {part: ms["total"] for part, ms in step_parts.by_part(kernels, hlo).items()} == {
        "FFN hidden layer": 1.0, "FFN, other": 1.0,
    }  # fmt: skip
