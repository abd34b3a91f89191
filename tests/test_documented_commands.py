"""The documentation's commands parse, its Python runs, its links lead somewhere and its configuration keys exist.

Commands are not run: their modules are started and their flags parsed, with the configuration that these name. What
entry points then do, tests of their own run.
"""

import functools
import json
import re
import subprocess
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from experiments import reproduce
from sparse_lm import config as config_lib
from sparse_lm.recipes import DENSE, Experts24
from sparse_lm.training.workdir import RESUMABLE_CHANGES
from tests.command_lines import ROOT, run_modules
from tests.documents import PAGES, commands, commands_of_block, python_blocks
from tests.recipes import examples
from tests.recipes.examples import DO, KEY, W1, W2, X

WITH_DOCSTRINGS = [*(ROOT / "configs").glob("*.py"), *(ROOT / "sparse_lm").glob("*.py")]
WITH_DOCSTRINGS += [path for path in (ROOT / "experiments").rglob("*.py") if "python -m" in path.read_text()]
COMMANDS = [command for page in (*PAGES, *WITH_DOCSTRINGS) for command in commands(page)]
REPRODUCE = ROOT / "experiments/reproduce.py"
MEASURE_AGAIN = {name: commands_of_block(REPRODUCE, row.command)[0] for name, row in reproduce.ROWS.items()}
COMMANDS += MEASURE_AGAIN.values()

PARSE_ONLY = """
import jax.experimental.pallas.mosaic_gpu
import matplotlib.pyplot
import scipy.stats
from absl import app, flags
from experiments import reproduce
from experiments.bench import layers, step_parts
from experiments.kernels import operands
from experiments.quality import controls, overview, suites, time_ratio
from sparse_lm import evaluate, export, prepare_data, report, train
from sparse_lm.config import parse, to_dict

def parse_only(main, argv=None, flags_parser=app.parse_flags_with_usage):
    found = {"positional": flags_parser(sys.argv)[1:]}
    if "config" in flags.FLAGS:
        found["config"] = to_dict(parse(flags.FLAGS.config))
    if "workdir" in flags.FLAGS and isinstance(flags.FLAGS.workdir, str):
        found["workdir"] = flags.FLAGS.workdir
    print(json.dumps(found), flush=True)
    os._exit(0)  # at once, without what Python does at its end

app.run = parse_only
"""


def is_ours(module):
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


@pytest.fixture(scope="module")
def parsed(tmp_path_factory):
    """Maps each command to what its flags say, or to the error if they do not parse."""
    directory = tmp_path_factory.mktemp("parsed")
    ours = [command for command in COMMANDS if is_ours(command.module)]
    distinct = sorted({(command.module, command.arguments) for command in ours})
    results = dict(zip(distinct, run_modules(distinct, directory, PARSE_ONLY), strict=True))
    found = {}
    for command in ours:
        done = results[command.module, command.arguments]
        said = [line for line in done.stdout.splitlines() if line.startswith('{"positional"')]
        found[command] = json.loads(said[0]) if said else {"error": done.stderr}
    return found


@pytest.mark.long
def test_flags_and_configurations_of_documented_commands_parse(parsed):
    assert len(parsed) > 30
    wrong = {str(c): said["error"][-400:] for c, said in parsed.items() if said.get("error")}
    assert not wrong, json.dumps(wrong, indent=1)
    assert sum("config" in said for said in parsed.values()) > 15
    unknown = [str(c) for c, said in parsed.items() if c.module.startswith("sparse_lm") and said["positional"]]
    assert not unknown


def test_a_page_never_resumes_a_run_with_what_it_would_refuse(parsed):
    """Two commands of a page that train in one workdir, `runs/NAME` by default, differ in what a run may change."""
    before = {}
    for command, said in parsed.items():
        if command.module != "sparse_lm.train":
            continue
        config_file = next(word for word in command.arguments if word.startswith("--config="))
        workdir = said.get("workdir") or f"runs/{config_file.split('/')[-1].removesuffix('.py')}"
        now = flatten_dict(said["config"], sep=".")
        first = before.setdefault((command.page, workdir), now)
        changed = {key for key in now if now[key] != first.get(key)}
        assert changed <= RESUMABLE_CHANGES, f"{command}: {workdir} has a run with another {sorted(changed)}"
    assert before


def test_what_measures_a_step_again_has_the_model_of_the_result_file(parsed):
    for name in ("step_llama1b", "step_afm"):
        result = json.loads((reproduce.RESULTS / reproduce.ROWS[name].file).read_text())
        config = parsed[MEASURE_AGAIN[name]]["config"]
        assert config["model"] == config["model"] | result["model"]
        assert (config["batch_size"], config["seq_len"]) == (result["batch_size"], result["seq_len"])


def test_make_has_the_documented_targets():
    targets = {command.arguments for command in COMMANDS if command.module == "make"}
    assert ("train",) in targets
    for target in targets:
        subprocess.run(["make", "--dry-run", *target], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_keys_and_links_of_a_page_exist(page):
    text = page.read_text()
    for module in re.findall(r"python -m ((?:experiments|sparse_lm|tests)[\w.]*)", text):
        assert is_ours(module), module
    keys = flatten_dict(config_lib.default().to_dict(), sep=".")
    named = re.findall(r"--config\.([a-z0-9_.]+)[=`]", text)
    named += re.findall(r"`((?:sparsity|model|optimizer|data|mesh)\.(?!json)[a-z0-9_]+)(?:`| *=)", text)
    assert not [key for key in named if key not in keys]
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
        path = (page.parent / target) if target else page
        assert path.exists(), target
        headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M) if anchor else []
        slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, f"{target}#{anchor}"


def run_python(page, block=0):
    """Runs a page's block of Python."""
    module = types.ModuleType("example")
    code = python_blocks(ROOT / "docs" / page)[block]
    exec(compile(code, page, "exec"), module.__dict__)
    return module, code


LOOPS = {"plain JAX": 120, "NNX": 80, "linen": 80}
"""The loops of docs/library.md, in order, and the step at which each leaves the sparse phase."""


@pytest.mark.long
@pytest.mark.parametrize("name", LOOPS)
def test_a_training_loop_of_the_library_page_trains(name, capsys):
    """The first dense phase and the sparse one lower the loss, and no phase and no flip raises it."""
    assert len(python_blocks(ROOT / "docs/library.md")) == len(LOOPS) + 1
    example, code = run_python("library.md", list(LOOPS).index(name))
    assert len(code.splitlines()) <= 85
    means = json.loads(capsys.readouterr().out)
    assert (np.diff(means) < (-0.1, -0.05, 0.03)).all(), means
    at_leaving = np.mean(example.losses[LOOPS[name] - 15 : LOOPS[name]])
    assert np.mean(example.losses[LOOPS[name] : LOOPS[name] + 15]) < at_leaving + 0.1  # batches differ by more


@pytest.mark.parametrize("name", ["dense", "dense_slices"])
def test_the_mesh_of_the_library_page_computes_the_gradients_of_one_device(name):
    example, recipe = run_python("library.md", len(LOOPS))[0], examples.RECIPES[name]
    state, x = examples.state_of(recipe), jnp.tile(X, (jax.device_count(), 1))
    alone = jax.value_and_grad(lambda w1, w2: jnp.mean(recipe.ffn(x, w1, w2, state)[0] ** 2), argnums=(0, 1))
    found = jax.jit(example.mean_square, static_argnums=0)(recipe, x, W1, W2, state, None)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-6), found, jax.jit(alone)(W1, W2))


def test_the_mixture_of_its_page_sums_a_tokens_experts():
    mixture = jax.jit(run_python("mixtures.md")[0].mixture, static_argnums=0)
    router, x = W1[:5], X
    found = mixture(DENSE, x, router, W1, W2, None, KEY)
    experts = zip(jnp.split(W1, 5), jnp.split(W2, 5), strict=True)
    by_expert = [jnp.square(jax.nn.relu(x @ w1.T)) @ w2 for w1, w2 in experts]
    scores = np.asarray(x @ router.T) / np.sqrt(x.shape[1])
    chosen = scores >= np.sort(scores, axis=1)[:, -2:-1]
    gates = np.exp(scores) * chosen
    gates /= gates.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found, np.einsum("te,etd->td", gates, by_expert), rtol=1e-4, atol=1e-5)

    recipe = Experts24(v=16)
    state, _ = jax.jit(recipe.enter)(W1, W2)
    of_router = jax.grad(lambda router: mixture(recipe, x, router, W1, W2, state, KEY).sum())(router)
    assert np.isfinite(of_router).all() and np.abs(of_router).max() > 0


def test_the_recipe_of_the_page_on_adding_one_is_right():
    """Its output and gradients are those of a dense FFN with the weights that it leaves."""
    example, _ = run_python("adding_a_recipe.md")
    recipe = example.Up24()

    @jax.jit
    def dense(w1):
        o, vjp = jax.vjp(lambda *a: jnp.square(jax.nn.relu(a[0] @ a[1].T)) @ a[2], X, w1, W2)
        return o, *vjp(DO)

    state, _ = jax.jit(recipe.enter)(W1, W2)
    *found, _ = examples.outputs_and_gradients(recipe)(X, W1, W2, DO, state, None, None)
    w1, w2 = jax.jit(recipe.leave)(W1, W2, state)
    np.testing.assert_array_equal(w2, W2)
    for reads_a_state in (recipe.refit, recipe.leave):
        with pytest.raises(ValueError, match="recipe 'up24' reads a state"):
            reads_a_state(W1, W2, None)
    assert (np.count_nonzero(np.reshape(w1, (-1, 4)), axis=1) <= 2).all()
    assert recipe.leave(W1.astype(jnp.bfloat16), W2, state)[0].dtype == jnp.bfloat16
    for a, b in zip(found, dense(w1), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(jnp.abs(b).max()))
