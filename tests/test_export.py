"""The entry point, and runs that start from what it wrote."""

import dataclasses
import errno
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_lm.config import Config, ModelConfig, OptimizerConfig, SparsityConfig
from sparse_lm.errors import ConfigError, OutputError
from sparse_lm.evaluate import evaluate
from sparse_lm.export import export
from sparse_lm.interop.pretrained import Pretrained
from sparse_lm.interop.shards import open_tensors
from sparse_lm.recipes import DENSE, RECIPES
from sparse_lm.training import loop
from sparse_lm.training.checkpoints.checkpoint import Checkpoints
from sparse_lm.training.checkpoints.restored import restore_for_dense
from sparse_lm.training.starting import restore_or_start
from sparse_lm.training.workdir import load_config, save_config
from tests.command_lines import run_python
from tests.interop.models import random_params, save_run, write_model
from tests.runs import small_config, train_and_crash

MODEL = ModelConfig(dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=32, vocab_size=283, dtype="float32")
SIGMOID = {"experts": 4, "expert_dim": 8, "activation": "swiglu", "router_scores": "sigmoid"}


def make_run(path, recipe, dense_layers=0, model=MODEL):
    """Checkpoints of steps 20 (in the sparse phase) and 40 (after it), of random weights."""
    sparsity = SparsityConfig(recipe=RECIPES[recipe](), start_step=10, end_step=30, dense_layers=dense_layers)
    config = Config(steps=50, seq_len=32, model=model, sparsity=sparsity, optimizer=OptimizerConfig(warmup_steps=1))
    state = {"scale_up": jnp.full(MODEL.layers, 1.5), "scale_down": jnp.full(MODEL.layers, 1.5)}
    return save_run(path, config, {20: 4.0, 40: 3.0}, state)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), "sste")


@pytest.mark.parametrize("step, dense_layers", [(20, 0), (20, 1), (40, 0)])
def test_exports_what_the_forward_uses(tmp_path, step, dense_layers):
    """In the sparse phase those are not the master weights."""
    (tmp_path / "run").mkdir()
    workdir = make_run(tmp_path / "run", "sste", dense_layers)
    export(workdir, tmp_path / "out", checkpoint=step, shard_bytes=5000)
    config = load_config(workdir)
    written = Pretrained(Config(init_from=str(tmp_path / "out"), model=config.model)).params()
    expected, _ = restore_for_dense(workdir, config, step)
    jax.tree.map(np.testing.assert_array_equal, written, expected)
    down = written["layers"]["ffn"]["down"]
    zeros = np.mean(down[dense_layers:] == 0)
    assert zeros >= 0.5 if step == 20 else zeros == 0
    assert (down[:dense_layers] != 0).all()
    # The card names steps that are done, of a phase that ends at 30.
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"sparse in steps 10..{min(step, 30) - 1}" in card
    assert f"| tokens seen | {step * config.tokens_per_step} |" in card
    assert ("FFNs of the first 1 layers" in card) == (dense_layers == 1)


@pytest.mark.long
def test_command_line_writes_the_newest_checkpoint_and_says_what_it_is(workdir, tmp_path):
    """It needs no GPU; neither it nor training needs PyTorch or transformers. The run may be writing its metrics."""
    line = json.dumps({"step": 39, "phase": "dense", "eval_loss": 2.5})
    (workdir / "metrics.jsonl").write_text(f'{line}\n{{"step": 40, "pha')
    code = (
        "import runpy, sys; sys.modules |= {'torch': None, 'transformers': None}; import sparse_lm.train;"
        "runpy.run_module('sparse_lm.export', run_name='__main__', alter_sys=True)"
    )
    flags = [f"--workdir={workdir}", f"--output={tmp_path / 'out'}"]
    run_python("-c", code, *flags, env=os.environ | {"JAX_PLATFORMS": "cuda"})
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    card = (tmp_path / "out" / "README.md").read_text()
    for part in ("ArceeForCausalLM", "40 of 50", "sste, sparse in steps 10..29", "2.5000 nats"):
        assert part in card


def test_an_empty_directory_is_replaced_where_a_link_leads(workdir, tmp_path):
    place, link = tmp_path / "place", tmp_path / "link"
    place.mkdir()
    link.symlink_to(place)
    export(workdir, link)
    assert "config.json" in os.listdir(place) and link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "place"]


def test_what_cannot_be_written_whole_leaves_nothing(workdir, tmp_path, monkeypatch):
    def write_some(directory, **_):
        (directory / "model.safetensors").write_text("some")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OutputError, match=r"cannot be written: .*No space left"):
        patched.setattr("sparse_lm.export.write_hf_directory", write_some)
        export(workdir, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_output_that_holds_something_is_refused(workdir, tmp_path):
    (tmp_path / "file").touch()
    for output, message in (
        (tmp_path, "must be a new or an empty directory"),
        (tmp_path / "file", "must be a new or an empty directory"),
        (tmp_path / "file" / "out", "cannot be written"),
    ):
        with pytest.raises(OutputError, match=message):
            export(workdir, output)


def test_a_mixture_of_gated_experts_is_exported(tmp_path):
    model = dataclasses.replace(MODEL, **SIGMOID, shared_expert_dim=16, qk_norm=True)
    (tmp_path / "run").mkdir()
    export(make_run(tmp_path / "run", "dense", model=model), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| recipe | dense |" in card and "| started from | random weights |" in card
    assert "Glm4MoeForCausalLM" in card and "4 experts of 8, 2 a token, and 16 of all tokens (swiglu)" in card
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in open_tensors(tmp_path / "out")


def test_a_model_that_transformers_does_not_have_is_refused(workdir, tmp_path):
    config = load_config(workdir)
    for changes, message in (
        ({"qk_norm": True}, r"config\.model\.qk_norm = True: must be False without a gate to export"),
        ({"heads": 3, "kv_heads": 3, "head_dim": 8}, r"config\.model\.heads = 3: must be a divisor of model\.dim = 16"),
        ({"experts": 4}, r"config\.model\.activation = 'squared_relu': must be one of swiglu, geglu"),
        (SIGMOID | {"router_scores": "softmax", "qk_norm": True}, r"config\.model\.qk_norm = True: must be False with"),
        (SIGMOID | {"shared_expert_dim": 12}, r"config\.model\.shared_expert_dim = 12: must be a multiple of model"),
    ):
        model = dataclasses.replace(config.model, **changes)
        sparsity = SparsityConfig(recipe=DENSE, start_step=10, end_step=30)
        save_config(tmp_path, dataclasses.replace(config, model=model, sparsity=sparsity))
        with pytest.raises(ConfigError, match=message):
            export(tmp_path, tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_a_run_starts_from_a_model_and_goes_on_without_it(corpus, tmp_path):
    config = small_config(corpus, "dense", init_from=str(tmp_path / "hf"), **{"data.eval_windows": 4})
    params = random_params(config.model)
    write_model(tmp_path / "hf", config.model, params, corpus / "tokenizer.json", shard_bytes=30_000)
    with Checkpoints(tmp_path / "new", keep=1) as checkpoints:
        state = restore_or_start(loop.make_trainer(config), checkpoints, Pretrained(config))
    jax.tree.map(np.testing.assert_array_equal, state.params, params)

    train_and_crash(config, tmp_path / "run", before=5)
    with pytest.raises(ConfigError, match=r"config\.init_from = '': the run in .* has"):
        loop.train(dataclasses.replace(config, init_from=""), str(tmp_path / "run"))
    shutil.rmtree(tmp_path / "hf")
    assert loop.train(config, str(tmp_path / "run"))
    assert load_config(tmp_path / "run").data.tokenizer == str(tmp_path / "hf" / "tokenizer.json")
    assert evaluate(str(tmp_path / "run"))["step"] == 12
