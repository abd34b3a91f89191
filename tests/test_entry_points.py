"""What a user meets on the command line: one line for a mistake, Ctrl-C, a run to repeat."""

import dataclasses
import os
import shutil
import sys

import pytest

from sparse_lm.training.workdir import load_config, save_config
from tests.command_lines import ROOT, assert_refused, run, run_each, run_modules
from tests.runs import command, small_config


@pytest.mark.long
def test_a_bad_command_is_one_clear_line(corpus, tmp_path):
    mistakes = {
        "--config.sparsity.m=6": "config.sparsity.m = 6: must be a positive multiple of 4",
        "--config.sparsity.recipee=fst": "did you mean --config.sparsity.recipe?",
        "--config.optimizer.learning-rate=0.1": "did you mean --config.optimizer.learning_rate?",
        "--config.learning_rate=0.1": "did you mean --config.optimizer.learning_rate?",
        "--config..steps=3": "did you mean --config.steps?",
        "--config.optimizer.lr=0.1": "config has no key 'optimizer.lr'; optimizer has beta1, ",
        "--config.lr=0.1": "config has no key 'lr'; config has ",
        "--config.sparsity=fst": "config has no key 'sparsity'; sparsity has dense_features, ",
        "--config.steps=1e3": "flag --config.steps=1e3: invalid literal for int()",
        "--config.sparsity.m=abc": "flag --config.sparsity.m=abc: invalid literal for int()",
        "--config.optimizer.learning_rate=fast": "flag --config.optimizer.learning_rate=fast: could not convert",
        "--config.sparsity.leave=perhaps": "flag --config.sparsity.leave=perhaps: ('Non-boolean argument",
        "--no_such_flag": "Unknown command line flag 'no_such_flag'",
        "config.steps=3": "unknown argument 'config.steps=3': flags begin with --",
        "--config.data.path=nowhere": "config.data.path = 'nowhere'",
        "--workdir=/proc/nowhere": "--workdir=/proc/nowhere: cannot be written",
        "--workdir=": "--workdir=: must not be empty",
        "--workdir=gs://bucket/run": "--workdir=gs://bucket/run: must be a path, not a URL",
        "--config.mesh.data=4": "takes 4 devices; the processes of this run have",
        "--profile_steps=3,1000": "--profile_steps=3,1000: must be first,end with first < end <= config.steps = ",
        "--config=configs/tinny.py": "--config=configs/tinny.py: there is no such file; did you mean tiny.py?",
        "--config=nowhere/config.json": "--config=nowhere/config.json: there is no such file",
        "--config=configs": "--config=configs: must be a Python file such as configs/tiny.py, or config.json of a run",
    }
    _, _, _, config, *arguments = command(corpus, tmp_path / "run")
    faulty = tmp_path / "faulty.py"
    faulty.write_text("import os\n\ndef get_config():\n    return os.no_such_thing\n")
    plain = tmp_path / "plain.py"
    plain.write_text("def get_config():\n    return {'steps': 3}\n")
    command_lines = [[config, *arguments, mistake] for mistake in mistakes]
    command_lines += [["--config.steps=3", config], [f"--config={plain}"], [f"--config={faulty}"], ["--help"]]
    command_lines[-3:-3] = [["--quiet"], [f"--config={corpus}/metadata.json"]]
    commands = [("sparse_lm.train", line) for line in command_lines]
    done = run_modules(commands, tmp_path, "import sparse_lm.train")
    *results, before, without, other_json, no_config_dict, of_the_file, help_ = done
    for words, result in zip(mistakes.values(), results, strict=True):
        assert_refused(result, words)
    assert_refused(before, "config.sparsity.end_step = 8: must not be after config.steps = 3")
    assert_refused(without, "flag --config=None: must name a file, such as configs/tiny.py")
    assert_refused(other_json, "metadata.json: cannot be read as config.json of a run: ")
    assert_refused(no_config_dict, "--config: get_config() must return a ConfigDict, not a dict")
    assert not (tmp_path / "run" / "config.json").exists()
    assert not list(ROOT.glob("gs:*"))
    assert f'File "{faulty}", line 4' in of_the_file.stderr  # whoever wrote it has to know where
    for flag in ("--config", "--workdir", "--[no]quiet"):  # which other modules define, too
        assert f"\n  {flag}: " in help_.stdout


def test_a_device_whose_memory_is_full_is_one_line_and_other_errors_are_whole():
    program = """
import jax.numpy as jnp
from sparse_lm import entry_point

def main():
    {}

entry_point.run(main, lambda: None, takes_less_memory="a smaller batch")
"""
    full, other = (
        run([sys.executable, "-c", program.format(line)], env=os.environ | {"JAX_PLATFORMS": "cpu"})
        for line in ("jnp.zeros(2**50, 'int8')", "raise RuntimeError('no such memory')")
    )
    assert_refused(full, "RESOURCE_EXHAUSTED: Out of memory allocating ", ": what takes less is a smaller batch")
    assert "Traceback" in other.stderr and "no such memory" in other.stderr


@pytest.mark.long
def test_a_run_is_repeated_from_its_config_json(corpus, tmp_path):
    config = small_config(corpus, "dense", **{"data.eval_windows": 4})
    save_config(tmp_path / "first", config)
    again = [f"--config={tmp_path / 'first' / 'config.json'}", "--config.seed=7"]
    repeated, nameless = run_each("sparse_lm.train", [[*again, f"--workdir={tmp_path / 'second'}"], again], tmp_path)
    assert_refused(nameless, "--workdir: must be given to repeat a run")
    assert repeated.returncode == 0 and "longer than a training sequence" not in repeated.stderr, repeated.stderr
    assert load_config(tmp_path / "second") == dataclasses.replace(config, seed=7)
    sample, _, continued = repeated.stdout.split("held-out text:\n")[1].partition("\ncontinued:\n")
    documents = [file.read_text() for file in corpus.parent.glob("*.txt")]
    assert len(sample) > 20 and any(sample in text for text in documents) and continued.strip()


def test_a_copy_of_a_config_runs_wherever_it_is(tmp_path):
    """Also of one that imports another, where Python finds sparse_lm alone."""
    shutil.copy(ROOT / "configs" / "llama7b.py", tmp_path / "mine.py")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "sparse_lm").symlink_to(ROOT / "sparse_lm")
    command_line = [sys.executable, "-m", "sparse_lm.train", f"--config={tmp_path / 'mine.py'}", "--config.mesh.data=2"]
    result = run(command_line, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path / "lib")})
    assert_refused(result, "config.mesh = ", "takes 2 devices")
