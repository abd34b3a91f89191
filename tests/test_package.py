"""What `pip install .` installs is whole, and trains from anywhere."""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]

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


def test_an_installed_package_trains_from_another_directory(tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = ["install", "--quiet", "--no-deps", "--no-build-isolation", f"--target={site}", str(_copy(tmp_path))]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    data = {path.name for path in site.rglob("*") if path.suffix in (".json", ".typed")}
    assert {"tuned.json", "py.typed"} <= data
    assert {path.name for path in site.iterdir() if path.suffix == ""} == {"bin", "sparse_lm"}
    assert "sparse-lm-train" in os.listdir(site / "bin")
    path = os.pathsep.join([str(site), sysconfig.get_paths()["purelib"]])
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN], cwd=elsewhere, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(site)


def test_extras_ask_for_what_the_requirements_files_ask_for():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = "\n".join(path.read_text() for path in ROOT.glob("requirements-*.txt")).splitlines()
    required = {re.sub(r"\s|#.*", "", line) for line in lines}
    asked = {re.sub(r"\s", "", wanted).replace("'", '"') for extra in extras.values() for wanted in extra}
    assert {"gpu", "triton", "test", "wandb", "harness"} == extras.keys()
    assert asked <= required


def test_ops_and_recipes_need_little_more_than_jax():
    """Nothing heavy is imported with them: jaxtyping is, where it is installed."""
    others = ("flax", "optax", "orbax", "ml_collections", "grain", "tensorflow_datasets", "rich")
    code = f"import sys; import sparse_lm.recipes, sparse_lm.ops; print([m for m in {others} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _copy(directory: Path) -> Path:
    """Copies what a build reads: building in the checkout would leave files there."""
    source = directory / "source"
    source.mkdir()
    files = ("pyproject.toml", "README.md", "requirements.txt")
    subprocess.run(["cp", "-r", "sparse_lm", *files, str(source)], cwd=ROOT, check=True)
    return source
