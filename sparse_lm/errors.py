"""The errors that a user can put right: entry points print the message, one line, and no traceback."""

from __future__ import annotations

import os
from typing import Any


class UserError(Exception):
    """Base of all. The message says what is wrong and what is allowed."""


class ConfigError(UserError):
    """A config value that cannot be used. The message names key, value and what is allowed."""

    def __init__(self, key: str, value: Any, allowed: str):
        super().__init__(f"config.{key} = {value!r}: {allowed}")
        self.key, self.allowed = key, allowed


class DataError(UserError):
    """Text, a tokenizer or prepared data that cannot be used. The message names the file and the reason."""


class WorkdirError(UserError):
    """A workdir that cannot be written, or does not hold what was asked of it."""

    def __init__(self, workdir: str | os.PathLike, reason: str):
        super().__init__(f"--workdir={os.fspath(workdir)}: {reason}")


class OutputError(UserError):
    """An output that cannot be written."""

    def __init__(self, output: str | os.PathLike, reason: str):
        super().__init__(f"--output={os.fspath(output)}: {reason}")
