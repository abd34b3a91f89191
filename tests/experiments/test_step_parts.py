"""Every product of a step is counted with its part of the model."""

import re

import pytest

from experiments.bench import step_parts
from tests import small

PARTS_WITH_PRODUCTS = {"FFN products", "attention projections", "attention scores", "loss"}
ROUTING = {"FFN routing", "FFN, other"}  # which of them the product with the centroids is depends on its scope


@pytest.mark.long
def test_products_belong_to_parts_that_have_some():
    config = small.config("slices")
    trainer, _ = small.compiled(config)
    lowered = trainer.step("sparse").lower(trainer.abstract_state(), small.windows(config))
    hlo = lowered.compile(compiler_options={"xla_backend_optimization_level": 0}).as_text()
    products = re.findall(r"^ +(?:ROOT )?%?([\w.\-]+) = .* dot\(", hlo, re.M)
    kernels = [step_parts.Kernel(name, name, 1.0) for name in products]
    parts = set(step_parts.by_part(kernels, hlo))
    assert parts - ROUTING == PARTS_WITH_PRODUCTS and parts & ROUTING


def test_kernels_of_the_hidden_layer_are_known_by_name():
    hlo = '  %a.1 = f32[] call(), metadata={op_name="jit(step)/feed_forward/pallas_call"}\n'
    kernels = [step_parts.Kernel(name, "a.1", 1.0) for name in ("squared_relu_gradients_kernel", "fusion_2")]
    assert {part: ms["total"] for part, ms in step_parts.by_part(kernels, hlo).items()} == {
        "FFN hidden layer": 1.0, "FFN, other": 1.0,
    }  # fmt: skip
