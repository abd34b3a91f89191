"""Tests run on a CPU unless a GPU is there; those marked `gpu` are skipped without one."""

import gc
import os
import pathlib
from importlib.metadata import version

# Most of the suite's time is XLA compiling small functions that run once: none is worth several threads' modules.
# Tests of meshes take eight devices.
_COMPILE_FAST = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)
if version("jaxlib").startswith("0.10."):  # as of 0.11 there is no older code generator, which compiled twice as fast
    _COMPILE_FAST += " --xla_cpu_use_fusion_emitters=false"
# Devices that wait for another longer than 40 s, as on a busy machine, end the process unless told to wait longer.
_WAIT = "--xla_cpu_collective_call_terminate_timeout_seconds=200"
os.environ.setdefault("XLA_FLAGS", f"{_COMPILE_FAST} {_WAIT} --xla_force_host_platform_device_count=8")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402


def pytest_collection_modifyitems(config, items):
    skipped = {}
    if jax.default_backend() != "gpu":
        skipped["gpu"] = pytest.mark.skip(reason="needs an NVIDIA GPU")
    if "slow" not in config.getoption("markexpr"):
        skipped["slow"] = pytest.mark.skip(reason="slow: name it with -m slow")
    for item in items:
        for name, skip in skipped.items():
            if item.get_closest_marker(name):
                item.add_marker(skip)


def pytest_collection_finish():
    """Modules and tests, which stay to the end, are not searched for garbage each time, and all else less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(scope="session", autouse=True)
def all_compiled_once():
    """Runs in one process share what they compile; those that a test changes, it makes itself."""
    from tests.runs import compiled_once

    with compiled_once():
        yield


@pytest.fixture(scope="module", autouse=True)
def programs_dropped():
    """Compiled programs are dropped before they fill the process's table of mappings, where LLVM would crash.

    Each has some; Linux allows 65,530.
    """
    yield
    mappings = pathlib.Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()


@pytest.fixture(scope="module", autouse=True)
def environment_as_it_was():
    """Fails a module that changes variables of XLA or JAX: processes started later would compile otherwise."""
    before = _read_by_jax()
    yield
    assert _read_by_jax() == before


def _read_by_jax():
    return {name: value for name, value in os.environ.items() if name.startswith(("XLA_", "JAX_"))}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A prepared corpus of a few hundred short documents, whose text lies beside it."""
    from sparse_lm.prepare_data import prepare_files

    directory = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    words = ["def", "return", "self", "for", "in", "range", "print", "import", "lambda", "yield", "class"]
    for i in range(200):
        text = " ".join(rng.choice(words, size=60))
        (directory / f"{i}.txt").write_text(f"# {i}\n{text}\n")
    prepare_files([str(directory / "*.txt")], directory / "prepared", seq_len=32, vocab_size=300)
    return directory / "prepared"


@pytest.fixture(scope="session")
def other_corpus(corpus):
    """Some of the documents, with the same tokenizer."""
    from sparse_lm.prepare_data import prepare_files

    directory = corpus.parent / "other"
    prepare_files([str(corpus.parent / "1*.txt")], directory, seq_len=32, tokenizer=str(corpus / "tokenizer.json"))
    return directory
