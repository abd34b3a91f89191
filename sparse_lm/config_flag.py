"""The flag `--config`: a Python file with `get_config()`, or the config.json of a run to repeat; and its overrides."""

from __future__ import annotations

import difflib
import json
import re
import sys
from pathlib import Path

import ml_collections
from absl import flags
from flax.traverse_util import flatten_dict
from ml_collections import config_flags

from sparse_lm import config as config_lib

_FILE, _OVERRIDE = re.compile("--?config="), re.compile(r"--?(?:no)?config\.([^=]*)")


def parse_flags(argv: list[str]) -> list[str]:
    """Parses the command line and returns what of it is no flag.

    Exits with one line if there is no such file, or no such key to override, or a value is of another type. Errors in a
    Python file keep their traceback, for whoever wrote it.
    """
    sys.path.append(str(Path(__file__).resolve().parents[1]))  # a copy of a file in configs/ may import others there
    while "--config" in argv[:-1]:
        index = argv.index("--config")
        argv = [*argv[:index], f"--config={argv[index + 1]}", *argv[index + 2 :]]
    for argument in filter(_FILE.match, argv):
        _check_file(argument.partition("=")[2])
    argv = [re.sub(r"^(--?config=)(.+\.json)$", rf"\g<1>{__file__}:\g<2>", argument) for argument in argv]
    argv = [argv[0], *sorted(argv[1:], key=lambda argument: not _FILE.match(argument))]  # overrides come behind it
    sys.argv = argv  # where config_flags looks for overrides
    keys = list(flatten_dict(config_lib.default().to_dict(), sep="."))
    for argument in argv:
        if (match := _OVERRIDE.match(argument)) and match[1] not in keys:
            sys.exit(f"{argument}: config has no key {match[1]!r}{_hint(match[1], keys)}")
    try:
        arguments = flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(str(error))
    if isinstance(flags.FLAGS.config, dict):
        sys.exit("--config: get_config() must return a ConfigDict, not a dict")
    flags.FLAGS.config.lock()  # raises what loading the file raised, if no override has
    return arguments


def _check_file(path: str) -> None:
    """Exits with one line unless this is a Python file, behind which an argument may stand, or a JSON file."""
    file = Path(path if path.endswith(".json") else path.partition(":")[0])
    if file.suffix not in (".py", ".json"):
        sys.exit(f"--config={path}: must be a Python file such as configs/tiny.py, or config.json of a run")
    if not file.is_file():
        close = difflib.get_close_matches(file.name, [other.name for other in file.parent.glob("*.py")], n=1)
        sys.exit(f"--config={path}: there is no such file{''.join(f'; did you mean {name}?' for name in close)}")


def _hint(key: str, keys: list[str]) -> str:
    """Names the key that was meant, or those of its group, or else the groups and the keys outside of them."""
    group = key.partition(".")[0]
    names = [other.removeprefix(f"{group}.") for other in keys if other.startswith(f"{group}.")]
    meant = [other for other in keys if other.rpartition(".")[2] == key.rpartition(".")[2]]
    meant += difflib.get_close_matches(key, keys, n=1, cutoff=0.8)
    if meant and not (names and key == group):
        return f"; did you mean --config.{meant[0]}?"
    if not names:
        group, names = "config", list(dict.fromkeys(other.partition(".")[0] for other in keys))
    return f"; {group} has {', '.join(names)}"


def run_name() -> str | None:
    """Returns the name that a run has by its configuration file; None if that is another run's."""
    file, _, argument = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")
    return None if argument.endswith(".json") else Path(file).stem


def get_config(path: str) -> ml_collections.ConfigDict:
    """Reads the config.json of a run. It is called as that of a Python file is: `parse_flags` names this module."""
    config = config_lib.default()
    try:
        values = flatten_dict(json.loads(Path(path).read_text(encoding="utf-8")), sep=".")
        # Where a value is None, the default stays, which an override can give a number to.
        config.update_from_flattened_dict({key: value for key, value in values.items() if value is not None})
    except (OSError, ValueError, TypeError, KeyError, AssertionError) as error:
        sys.exit(f"--config={path}: cannot be read as config.json of a run: {error}")
    return config
