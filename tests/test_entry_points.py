"""What a user meets on the command line: one line for a mistake, Ctrl-C, a run to repeat."""

import dataclasses
import os
import shutil
import subprocess
import sys

import pytest

from sparse_lm.training.workdir import load_config, save_config
from tests.command_lines import ROOT, run_each
from tests.test_train import command, corpus, run, small_config  # noqa: F401 (a fixture)


def assert_one_line(result, *words):
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_bad_training_command_is_one_clear_line(corpus, tmp_path):  # noqa: F811
    mistakes = {
        "--config.sparsity.m=6": "config.sparsity.m = 6: must be a multiple of 4",
        "--config.sparsity.recipee=fst": "did you mean --config.sparsity.recipe?",
        "--config.optimizer.learning-rate=0.1": "did you mean --config.optimizer.learning_rate?",
        "--config.=3": "--config.=3: config has no key ''",
        "--config..steps=3": "did you mean --config.steps?",
        "--config.steps[0]=3": "did you mean --config.steps?",
        "--config.optimizer=3": "config has no key 'optimizer'",
        "--config.steps=many": "steps",
        "--config.data.path=nowhere": "config.data.path = 'nowhere'",
        "--workdir=/proc/nowhere": "--workdir=/proc/nowhere: cannot be written",
        "--workdir=gs://bucket/run": "--workdir=gs://bucket/run: must be a directory, not a URL",
        "--config.mesh.data=4": "takes 4 devices; the processes of this run have",
        "--config=configs/none.py": "--config: [Errno 2] No such file or directory: 'configs/none.py'",
        "--config=nowhere/config.json": "--config=nowhere/config.json: cannot be read: ",
        "--profile_steps=3,2": "--profile_steps=3,2: must be first,end with first < end <= config.steps = ",
        "--profile_steps=3,1000": "--profile_steps=3,1000: must be first,end",
    }
    _, _, _, config, *arguments = command(corpus, tmp_path / "run")
    faulty = tmp_path / "faulty.py"
    faulty.write_text("import os\n\ndef get_config():\n    return os.no_such_thing\n")
    command_lines = [[config, *arguments, mistake] for mistake in mistakes]
    command_lines += [["--config.steps=3", config], [config.replace("small_run.py", "faulty.py"), "--config.steps=3"]]
    *results, order, of_the_file = run_each("sparse_lm.train", command_lines, tmp_path)
    for words, result in zip(mistakes.values(), results, strict=True):
        assert_one_line(result, words)
    assert_one_line(order, "--config.steps=3: must come behind --config")
    assert not (tmp_path / "run" / "config.json").exists()
    assert not list(ROOT.glob("gs:*"))
    assert f'File "{faulty}", line 4' in of_the_file.stderr  # whoever wrote it has to know where


def test_a_run_is_repeated_from_its_config_json(corpus, tmp_path):  # noqa: F811
    config = small_config(corpus, "dense", steps=2, **{"optimizer.warmup_steps": 1, "data.eval_windows": 4})
    save_config(tmp_path / "first", config)
    again = [f"--config={tmp_path / 'first' / 'config.json'}", "--config.seed=7"]
    repeated, nameless = run_each("sparse_lm.train", [[*again, f"--workdir={tmp_path / 'second'}"], again], tmp_path)
    assert_one_line(nameless, "--workdir: must be given to repeat a run")
    assert repeated.returncode == 0, repeated.stderr
    assert load_config(tmp_path / "second") == dataclasses.replace(config, seed=7)
    sample = repeated.stdout.split("held-out text:\n")[1].partition("\ncontinued:\n")[0]
    documents = [file.read_text() for file in corpus.parent.glob("*.txt")]
    assert len(sample) > 20 and any(sample in text for text in documents)


def test_a_copy_of_a_config_runs_wherever_it_is(tmp_path):
    """Also of one that imports another, where Python finds sparse_lm alone."""
    shutil.copy(ROOT / "configs" / "llama7b.py", tmp_path / "mine.py")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "sparse_lm").symlink_to(ROOT / "sparse_lm")
    command_line = [sys.executable, "-m", "sparse_lm.train", f"--config={tmp_path / 'mine.py'}", "--config.mesh.data=2"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "lib")}
    result = subprocess.run(command_line, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert_one_line(result, "config.mesh = ", "takes 2 devices")


@pytest.mark.parametrize("module", ["evaluate", "generate"])
def test_ctrl_c_is_one_line(module, tmp_path):
    code = (
        f"import runpy, signal; import sparse_lm.training.workdir as workdir;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # a shell's background jobs ignore it
        "workdir.load_config = lambda path: signal.raise_signal(signal.SIGINT);"
        f"runpy.run_module('sparse_lm.{module}', run_name='__main__', alter_sys=True)"
    )
    result = run([sys.executable, "-c", code, f"--workdir={tmp_path}"])
    assert (result.returncode, result.stderr) == (1, "interrupted\n")


def test_a_save_that_fails_prints_one_sentence_with_the_path(corpus, tmp_path):  # noqa: F811
    """No file grows over 64 KiB; those of the checkpoint would."""
    wide = ["--config.model.dim=256", "--config.model.ffn_dim=1024", "--config.steps=3", "--quiet"]
    arguments = command(
        corpus, tmp_path / "run", *wide, "--config.sparsity.start_step=0", "--config.sparsity.end_step=0"
    )
    limited = ["bash", "-c", 'ulimit -f 64; exec "$@"', "-", *arguments]
    result = run(limited, env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"})
    message = (
        f"checkpoint 3 could not be saved in {tmp_path / 'run' / 'checkpoints'}, and there is none: File too large"
    )
    assert result.returncode == 1
    assert result.stderr.splitlines() == [message, f"--workdir={tmp_path / 'run'}: {message}"]
    assert result.stdout == ""


def test_help_has_the_flags_that_other_modules_define():
    for module, flags in (("train", ["--config", "--workdir", "--quiet"]), ("export", ["--output", "--checkpoint"])):
        help_text = run([sys.executable, "-m", f"sparse_lm.{module}", "--help"]).stdout
        for flag in flags:
            assert f"\n  {flag}: " in help_text or f"\n  --[no]{flag[2:]}: " in help_text
