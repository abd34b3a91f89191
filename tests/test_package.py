"""What `pip install .` installs is whole, and trains from anywhere."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.command_lines import ROOT, run, run_python

TRAIN = """
import jax, jax.numpy as jnp
from sparse_lm.recipes import Slices
recipe, key = Slices(m=8, v=16), jax.random.key(0)
x, w1, w2 = (scale * jax.random.normal(jax.random.key(n), (64, 32)) for n, scale in enumerate((1, 0.1, 0.1)))
state, order = recipe.enter(w1, w2, x)
loss = lambda w1, w2: jnp.mean(recipe.ffn(x, w1[order], w2[order], state, key=key)[0] ** 2)
before, gradient = jax.jit(jax.value_and_grad(loss))(w1, w2)
assert jax.jit(loss)(w1 - 1e-2 * gradient, w2) < before
import sparse_lm, sparse_lm.train
print(sparse_lm.__file__)
"""


@pytest.mark.long
def test_a_fresh_environment_installs_imports_and_trains_from_another_directory(tmp_path):
    """The package asks for what requirements.txt names, which is what the environment here has."""
    fresh, elsewhere, source = (tmp_path / name for name in ("fresh", "elsewhere", "source"))
    elsewhere.mkdir()
    source.mkdir()  # building in the checkout would leave files there
    read = ("sparse_lm", "pyproject.toml", "README.md", "requirements.txt")
    subprocess.run(["cp", "-r", *read, str(source)], cwd=ROOT, check=True)
    venv.create(fresh)
    python = fresh / "bin/python"
    installed = Path(sysconfig.get_path("purelib", "venv", {"base": str(fresh)}))
    (installed / "here.pth").write_text(sysconfig.get_path("purelib"))
    options = ("--quiet", "--no-compile", "--no-deps")  # Python compiles what it imports
    subprocess.run([sys.executable, "-m", "pip", f"--python={python}", "install", *options, source], check=True)
    (metadata,) = importlib.metadata.distributions(name="sparse_lm", path=[str(installed)])
    asked = [Requirement(line) for line in metadata.requires if "extra ==" not in line]
    lines = [line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    assert set(asked) == {Requirement(line) for line in lines if line}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([python, "-c", TRAIN], cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    package = Path(done.stdout.strip()).parent
    assert package.is_relative_to(fresh)
    assert (package / "py.typed").exists()
    assert {path.name for path in package.parent.iterdir()}.isdisjoint({"configs", "experiments", "tests"})
    assert (fresh / "bin/sparse-lm-train").exists()


@pytest.mark.long
def test_the_type_checker_passes_on_what_other_code_bases_import(tmp_path):
    """Ops, recipes and the NNX module. Its cache is that of `make lint`."""
    pytest.importorskip("mypy", reason="needs mypy")
    wrong = tmp_path / "caller.py"
    wrong.write_text("from sparse_lm.recipes import Slices\n\nSlices(m='16').ffn(1)\n")
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    found = run([sys.executable, "-m", "mypy", *checked, str(wrong)]).stdout
    *errors, summary = found.splitlines()
    assert " errors in 1 file (checked " in summary, found
    assert all("caller.py" in error for error in errors), found  # annotations reach a caller
    assert 'Argument "m" to "Slices" has incompatible type "str"' in found
    assert 'Missing positional arguments "w1", "w2" in call to "ffn"' in found


def test_extras_ask_for_what_the_requirements_files_ask_for():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = "\n".join(path.read_text() for path in ROOT.glob("requirements-*.txt")).splitlines()
    required = {re.sub(r"\s|#.*", "", line) for line in lines}
    asked = {re.sub(r"\s", "", wanted).replace("'", '"') for extra in extras.values() for wanted in extra}
    assert {"gpu", "triton", "test", "wandb", "harness"} == extras.keys()
    assert asked <= required


def test_every_package_that_is_imported_is_required():
    """Others bring it today, and need not tomorrow. jaxlib is a part of JAX, and jinja2 one of lm-eval's interface."""

    def canonical(name):
        return re.sub(r"[._-]+", "-", name).lower()

    lines = "\n".join(path.read_text() for path in ROOT.glob("requirements*.txt")).splitlines()
    required = {canonical(match[0]) for line in lines if (match := re.match(r"[\w.-]+", line))}
    imported = set()
    for path in (ROOT / "sparse_lm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.partition(".")[0])
    installed = importlib.metadata.packages_distributions()
    others = imported & installed.keys() - {"sparse_lm", "jaxlib", "jinja2"}
    assert len(others) > 15
    assert [name for name in others if required.isdisjoint(map(canonical, installed[name]))] == []


IMPORTS = """
import sys
sys.modules.update(triton=None)  # importing it raises ImportError
from sparse_lm import ops, recipes
print(sys.modules.keys() & {"flax", "optax", "orbax", "ml_collections", "grain", "tensorflow_datasets", "rich"})
import sparse_lm.train
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized())
import jax.numpy as jnp
print(ops.matmul_24(ops.sparsify_24(jnp.ones((8, 8))), jnp.ones((8, 4))).shape)
"""


def test_ops_and_recipes_need_little_more_than_jax_and_training_does_not_start_it_as_it_is_imported():
    """Nothing heavy comes with ops: jaxtyping is light. What training asks of JAX would come too late otherwise.

    Without a GPU nothing imports Triton.
    """
    assert run_python("-c", IMPORTS).stdout.splitlines() == ["set()", "False", "(8, 4)"]


def test_preparing_data_does_not_import_jax():
    """It starts several processes, each of which would import it."""
    assert run_python("-c", "import sys, sparse_lm.prepare_data; print('jax' in sys.modules)").stdout.strip() == "False"
