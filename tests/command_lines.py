"""Commands as a user starts them, in processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
Done = subprocess.CompletedProcess[str]


def run(command: Sequence, **options) -> Done:
    """Runs a command, from the root of the checkout by default, and keeps what it prints."""
    return subprocess.run(command, **dict(cwd=ROOT, capture_output=True, text=True, timeout=240) | options)


def run_python(*arguments, **options) -> Done:
    """Runs Python, which must succeed."""
    done = run([sys.executable, "-W", "ignore", *arguments], **options)
    assert done.returncode == 0, done.stderr
    return done


FORK_FOR_EACH = """
import gc, importlib, json, os, runpy, sys, traceback

first, command_lines, outputs = json.loads(sys.argv[1])
exec(first)
gc.freeze()
codes = []
for number, (module, arguments) in enumerate(command_lines):
    if child := os.fork():
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        continue
    for stream in (1, 2):
        os.dup2(os.open(f"{outputs}/{number}.{stream}", os.O_WRONLY | os.O_CREAT), stream)
    sys.argv[1:] = arguments
    sys.modules.pop(module, None)  # what it imports stays
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code or 0
        if isinstance(code, str):
            code = print(code, file=sys.stderr) or 1
    except BaseException:
        code = traceback.print_exc() or 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: collecting all that was imported takes half a second
print(codes)
"""


def run_modules(command_lines: Sequence, directory: Path, first: str, cwd: Path = ROOT) -> list[Done]:
    """Runs `python -m module` with arguments, for each pair of the two, forked off one process.

    Args:
      command_lines: pairs of a module and its arguments.
      directory: takes what the processes write.
      first: Python to run before they are forked, such as imports.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_python("-c", FORK_FOR_EACH, json.dumps([first, command_lines, str(directory)]), cwd=cwd, env=environment)
    results = []
    for number, (given, code) in enumerate(zip(command_lines, json.loads(done.stdout), strict=True)):
        stdout, stderr = ((directory / f"{number}.{stream}").read_bytes().decode() for stream in (1, 2))
        assert code >= 0, f"{given} died of signal {-code}: {stderr}"
        results.append(subprocess.CompletedProcess(given, code, stdout, stderr))
    return results


def run_each(module: str, command_lines: Sequence[Sequence[str]], directory: Path, cwd: Path = ROOT) -> list[Done]:
    """Runs `python -m module` with each list of arguments."""
    return run_modules([(module, line) for line in command_lines], directory, f"import {module}", cwd)


def assert_refused(result: Done, *words: str) -> None:
    """Asserts that a command failed and said why, without a traceback."""
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr
