import logging
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm import ops
from sparse_lm.ops import backends, hopper, reference, triton
from tests.command_lines import ROOT
from tests.documents import python_blocks

W = jax.jit(ops.sparsify_24)(jnp.ones((8, 8)))
B = jnp.ones((8, 4))


@pytest.fixture(autouse=True)
def forget_what_was_logged():
    backends._log_once.cache_clear()


@pytest.fixture
def picky_backend(monkeypatch):
    """A backend that this machine can run, with one op, which refuses wide operands."""

    def matmul_24(w, b, *, out_dtype, **orientation):
        if b.shape[1] > 4:
            raise NotImplementedError("N = 5 is too wide")
        return reference.matmul_24(w, b, out_dtype=out_dtype, **orientation)

    module = types.ModuleType("sparse_lm.ops.hopper")
    module.matmul_24, module.unavailable = matmul_24, lambda device: None
    monkeypatch.setitem(sys.modules, module.__name__, module)


def _used(operand, implementation=None):
    with backends.record() as used:
        jax.eval_shape(lambda b: ops.matmul_24(W, b, implementation=implementation), operand)
    return used


def test_the_best_backend_that_does_not_refuse_runs(picky_backend, caplog):
    caplog.set_level(logging.INFO)
    assert _used(B) == {"matmul_24": {"hopper"}}
    assert not caplog.messages
    for _ in range(2):
        assert _used(jnp.ones((8, 5))) == {"matmul_24": {"reference"}}
    assert caplog.messages.count("matmul_24 passes over 'hopper': N = 5 is too wide") == 1
    with backends.record() as used:
        jax.eval_shape(lambda w: ops.sparsify_24_tiles(w, w > 0), W.to_dense())
    assert used == {"sparsify_24_tiles": {"reference"}}
    assert "sparsify_24_tiles passes over 'hopper': that backend has no sparsify_24_tiles" in caplog.messages


def on(monkeypatch, kind, capability=None):
    """Makes a device the only one."""
    device = types.SimpleNamespace(device_kind=kind, platform=kind, compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])


def test_a_named_backend_runs_or_raises(picky_backend):
    assert _used(B, "hopper") == {"matmul_24": {"hopper"}}
    assert _used(B, "reference") == {"matmul_24": {"reference"}}
    with pytest.raises(NotImplementedError, match="implementation 'hopper' of matmul_24: N = 5 is too wide"):
        ops.matmul_24(W, jnp.ones((8, 5)), implementation="hopper")
    with pytest.raises(NotImplementedError, match="'hopper' of sparsify_venom: that backend has no sparsify_venom"):
        ops.sparsify_venom(jnp.ones((8, 8)), 4, 4, implementation="hopper")
    with pytest.raises(ValueError, match="implementation = 'cuda' must be one of reference, hopper, triton"):
        ops.matmul_24(W, B, implementation="cuda")


def test_machines_without_a_gpu_run_the_reference_only_and_say_so_once(monkeypatch, caplog):
    on(monkeypatch, "cpu")
    caplog.set_level(logging.INFO)
    jax.eval_shape(lambda x: (ops.matmul_24(ops.sparsify_24(x), B), ops.sparsify_venom(x, 4, 4)), jnp.ones((8, 8)))
    reason = "needs an NVIDIA GPU; this process runs on cpu"
    assert [m for m in caplog.messages if "pass over" in m] == [
        f"operations pass over {name!r}: {reason}" for name in ("hopper", "triton")
    ]
    assert _used(B) == {"matmul_24": {"reference"}}
    for name in ("hopper", "triton"):
        with pytest.raises(NotImplementedError, match=reason):
            ops.matmul_24(W, B, implementation=name)


@pytest.mark.parametrize(
    "name, capability, reason",
    [
        ("hopper", "10.0", r"needs compute capability 9\.x; NVIDIA X has 10\.0"),
        ("triton", "7.5", r"needs a compute capability of 8\.0, 8\.6, .*12\.0, 12\.1; NVIDIA X has 7\.5"),
    ],
)
def test_other_gpus_are_named(name, capability, reason, monkeypatch):
    on(monkeypatch, "NVIDIA X", capability)
    with pytest.raises(NotImplementedError, match=reason):
        ops.matmul_24(W, B, implementation=name)


@pytest.mark.parametrize(
    "capability, best, described",
    [
        ("7.5", "reference", "reference"),
        ("8.0", "triton", "triton (compiled for compute capability 8.0, never run on it)"),
        ("9.0", "hopper", "hopper"),
        ("12.0", "triton", "triton (compiled for compute capability 12.0, never run on it)"),
    ],
)
def test_the_gpu_decides_and_it_is_said_where_a_backend_has_never_run(capability, best, described, monkeypatch):
    on(monkeypatch, "NVIDIA X", capability)
    monkeypatch.setattr(backends, "import_error", lambda package, modules: None)
    for backend in (hopper, triton):
        monkeypatch.setitem(vars(backend), "matmul_24", reference.matmul_24)
    assert _used(B) == {"matmul_24": {best}}
    assert backends.describe(best) == described
    assert capability != "9.0" or backends.describe("triton") == "triton"


@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_a_backend_that_cannot_be_used_says_why(name, monkeypatch):
    on(monkeypatch, "NVIDIA X", "9.0")
    if name == "hopper":
        with jax.enable_x64(True):
            assert backends.unavailable("hopper") == "needs jax_enable_x64 off: its kernels count in int32"
    monkeypatch.setitem(sys.modules, f"sparse_lm.ops.{name}.passes.sparsify_24", None)
    assert backends.unavailable(name).startswith("cannot be imported: ")


def test_the_backend_of_the_documentation(monkeypatch):
    backend = types.ModuleType("sparse_lm.ops.mine")
    (code,) = python_blocks(ROOT / "docs" / "adding_a_backend.md")
    exec(code, vars(backend))
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    monkeypatch.setattr(backends, "NAMES", (*backends.NAMES, "mine"))
    monkeypatch.setattr(backends, "_BEFORE_REFERENCE", ("mine",))
    on(monkeypatch, "cpu")
    assert _used(B) == {"matmul_24": {"mine"}}
    for turned in (False, True):
        both = (ops.matmul_24(W, B, out_transposed=turned, implementation=name) for name in ("mine", "reference"))
        np.testing.assert_allclose(*both, rtol=1e-6)
    assert _used(B.astype(jnp.bfloat16)) == {"matmul_24": {"reference"}}
    with pytest.raises(NotImplementedError, match="'mine' of matmul_24: takes float32, not bfloat16"):
        ops.matmul_24(W, B.astype(jnp.bfloat16), implementation="mine")
    on(monkeypatch, "gpu")
    assert _used(B) == {"matmul_24": {"reference"}}


def test_records_nest_and_end_also_with_an_error():
    with backends.record() as outer:
        with backends.record() as inner:
            _used(B)
        jax.eval_shape(lambda b: ops.sparsify_24(b), B)  # a new function, which no other test has traced
    with pytest.raises(ValueError, match="top_k"), backends.record() as failed:
        ops.sparsify_24(B, "top_k")
    _used(B)
    assert set(inner) == {"matmul_24"} and set(outer) == {"matmul_24", "sparsify_24"} and not failed
