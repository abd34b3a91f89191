"""Defines --output of every measuring command, and writes that file: tables, machine and day."""

from __future__ import annotations

import datetime
import json
import pathlib
import time
from typing import Any

import jax
from absl import flags

from sparse_lm.files import replacing

OUTPUT = flags.DEFINE_string("output", None, "JSON file to write.", required=True)

_IMPORTED = time.monotonic()


def write_results(**tables: Any) -> None:
    """Writes the machine, the seconds that the process took, and the tables, which may name another device.

    The directory of the file is made if need be.
    """
    results = dict(
        device=jax.devices()[0].device_kind,
        date=datetime.date.today().isoformat(),
        jax=jax.__version__,
        platform_version=jax.devices()[0].client.platform_version.split("\n")[0],
        process_seconds=round(time.monotonic() - _IMPORTED),
    )
    with replacing(pathlib.Path(OUTPUT.value)) as partial:
        partial.write_text(json.dumps(results | tables, indent=1) + "\n")


def show(row: dict[str, Any]) -> dict[str, Any]:
    """Prints a row of a table, its numbers rounded, and returns it."""
    print(*(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()),
          sep=", ", flush=True)  # fmt: skip
    return row
