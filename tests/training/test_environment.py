"""Training asks JAX for a GPU's memory before it starts, and says where programs are kept; runs repeat to the bit."""

import os

import jax
import pytest

from sparse_lm.training.environment import keep_programs, request_memory
from tests.command_lines import run
from tests.runs import command, trace

NAMES = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"  # of jaxlib, which refuses both together


@pytest.mark.parametrize("given", [{}, {NAMES[0]: "0.5"}, {NAMES[1]: "0.5"}], ids=["nothing", "now", "formerly"])
def test_a_user_who_has_said_how_much_memory_is_not_overruled(given, monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what is set below goes with this test
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    request_memory()
    found = {name: os.environ[name] for name in NAMES if name in os.environ}
    assert found == (given or {NAMES[0]: "0.9"})


@pytest.mark.parametrize(
    "backend, given, kept", [("gpu", None, "run/programs"), ("gpu", "/shared", "/shared"), ("cpu", None, None)]
)
def test_programs_are_kept_on_a_gpu_where_the_user_says_or_in_the_workdir(backend, given, kept, monkeypatch, tmp_path):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    jax.config.update("jax_compilation_cache_dir", given)
    try:
        keep_programs(str(tmp_path / "run"))
        assert jax.config.jax_compilation_cache_dir == (kept and str(tmp_path / kept))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.gpu
@pytest.mark.parametrize("end_of_phase", [4, 8])  # dense throughout, and with a sparse phase
def test_two_runs_on_a_gpu_are_the_same_to_the_bit(end_of_phase, corpus, tmp_path, monkeypatch):
    """In bfloat16, with flash attention, at widths that kernels take."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    overrides = [
        f"--config.sparsity.end_step={end_of_phase}", "--config.sparsity.v=64", "--config.model.dtype=bfloat16",
        "--config.model.dim=256", "--config.model.ffn_dim=1024", "--config.seq_len=32", "--config.batch_size=64",
    ]  # fmt: skip
    traces = []
    for name in ("first", "second"):
        result = run(command(corpus, tmp_path / name, *overrides))
        assert result.returncode == 0, result.stderr
        traces.append(trace(tmp_path / name))
    assert len(traces[0]) == 12
    assert traces[0] == traces[1]
