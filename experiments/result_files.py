"""Files of results: tables, the machine and the day that they are of, and how long they took."""

from __future__ import annotations

import datetime
import json
import pathlib
import time
from typing import Any

import jax

_IMPORTED = time.monotonic()


def machine() -> dict[str, str]:
    """Says what results were taken on, and when."""
    return dict(
        device=jax.devices()[0].device_kind,
        date=datetime.date.today().isoformat(),
        jax=jax.__version__,
        platform_version=jax.devices()[0].client.platform_version.split("\n")[0],
    )


def write_results(path: str, tables: dict[str, Any]) -> None:
    """Writes JSON of the machine, the seconds that the process took, and the tables, which may name another device."""
    seconds = round(time.monotonic() - _IMPORTED)
    pathlib.Path(path).write_text(json.dumps({**machine(), "process_seconds": seconds, **tables}, indent=1) + "\n")
