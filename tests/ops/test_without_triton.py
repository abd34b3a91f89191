"""Triton is needed where its kernels run, and nowhere else."""

import subprocess
import sys

import pytest

# The tests of training run such steps; here it matters what they import.
TRACE_A_SPARSE_STEP = """
import sys
sys.modules.update(triton=None)  # importing it raises ImportError
import jax
from sparse_lm import train
from sparse_lm.training.step import make_trainer
from tests import small
config = small.config("venom")
trainer = make_trainer(config)
_, metrics = jax.eval_shape(trainer.sparse_step, jax.eval_shape(trainer.init), small.windows(config))
print(metrics["loss"].shape)
"""


@pytest.mark.long
def test_training_on_a_cpu_imports_no_triton():
    run = subprocess.run([sys.executable, "-c", TRACE_A_SPARSE_STEP], capture_output=True, check=True, text=True)
    assert run.stdout == "()\n"
