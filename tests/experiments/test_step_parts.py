"""Every product of a step is counted with its part of the model."""

import re

from experiments.bench import step_parts
from tests import small

PARTS_WITH_PRODUCTS = {"FFN products", "FFN routing", "attention projections", "attention scores", "loss"}


def test_products_belong_to_parts_that_have_some():
    """With a pattern known first, since the plan then has products that others lack."""
    config = small.config("slices")
    trainer, _ = small.compiled(config)
    lowered = trainer.sparse_step.lower(trainer.abstract_state(), small.windows(config))
    hlo = lowered.compile(compiler_options={"xla_backend_optimization_level": 0}).as_text()
    products = re.findall(r"^ +(?:ROOT )?%?([\w.\-]+) = .* dot\(", hlo, re.M)
    kernels = [step_parts.Kernel(name, name, 1.0) for name in products]
    assert set(step_parts.by_part(kernels, hlo)) == PARTS_WITH_PRODUCTS
