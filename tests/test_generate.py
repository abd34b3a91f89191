"""The entry point, on a workdir made by hand."""

import dataclasses
import shutil
import subprocess
import sys

import jax
import pytest

from sparse_lm import generate
from sparse_lm.config import Config, ModelConfig
from sparse_lm.data.tokenizer import train_tokenizer
from sparse_lm.model import llama
from sparse_lm.training.checkpoint import Checkpoints
from sparse_lm.training.workdir import WorkdirError, save_config

OPTIONS = dict(max_new_tokens=12, temperature=1.0, top_p=0.9)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    tokenizer = train_tokenizer(["def main():\n    return 0\n"] * 8, vocab_size=280)
    tokenizer.save(str(path / "tokenizer.json"))
    model = ModelConfig(dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=32, vocab_size=280, dtype="float32")
    save_config(path, dataclasses.replace(Config(), model=model, seq_len=32))
    with Checkpoints(path, keep=1) as checkpoints:
        checkpoints.save(3, {"params": llama.init(model, jax.random.key(0))[1]})
        checkpoints.wait()
    return path


def test_continues_the_prompt_reproducibly(workdir):
    first, again, other = (generate.continue_text(workdir, "def main(", seed=seed, **OPTIONS) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert first.startswith("def main(")
    assert len(first) > len("def main(")


def test_an_empty_prompt_starts_a_document(workdir):
    assert isinstance(generate.continue_text(workdir, "", **OPTIONS), str)


def test_command_line(workdir):
    command = [sys.executable, "-m", "sparse_lm.generate", f"--workdir={workdir}", "--prompt=def main("]
    flags = [f"--{name}={value}" for name, value in OPTIONS.items()]
    run = subprocess.run([*command, *flags, "--seed=3000000000"], capture_output=True, check=True)
    assert run.stdout.decode() == generate.continue_text(workdir, "def main(", seed=3_000_000_000, **OPTIONS) + "\n"


@pytest.mark.parametrize("missing", ["config.json", "checkpoints"])
def test_an_incomplete_workdir_is_named(workdir, tmp_path, missing):
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    path = tmp_path / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(WorkdirError, match=tmp_path.name):
        generate.continue_text(tmp_path, "x", **OPTIONS)
