"""Command lines of an entry point, each in a process of its own, forked off one that has imported everything."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent

FORK_FOR_EACH = """
import importlib, json, os, runpy, sys

module, command_lines, outputs = json.loads(sys.argv[1])
importlib.import_module(module)
del sys.modules[module]  # what it imports stays
codes = []
for number, arguments in enumerate(command_lines):
    if child := os.fork():
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        continue
    for stream in (1, 2):
        os.dup2(os.open(f"{outputs}/{number}.{stream}", os.O_WRONLY | os.O_CREAT), stream)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()
print(codes)
"""


def run_each(
    module: str, command_lines: Sequence[Sequence[str]], directory: Path, cwd: Path = ROOT
) -> list[subprocess.CompletedProcess[str]]:
    """What `python -m module` does with each list of arguments; `directory` takes what the processes write."""
    arguments = json.dumps([module, command_lines, str(directory)])
    command = [sys.executable, "-W", "ignore", "-c", FORK_FOR_EACH, arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    results = []
    for number, (given, code) in enumerate(zip(command_lines, json.loads(done.stdout), strict=True)):
        stdout, stderr = ((directory / f"{number}.{stream}").read_bytes().decode() for stream in (1, 2))
        results.append(subprocess.CompletedProcess(given, code, stdout, stderr))
    return results
