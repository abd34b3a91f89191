"""Files of results: tables, and the machine and the day that they are of."""

from __future__ import annotations

import datetime
import json
import pathlib
from typing import Any

import jax


def machine() -> dict[str, str]:
    """Says what results were taken on, and when."""
    return dict(
        device=jax.devices()[0].device_kind,
        date=datetime.date.today().isoformat(),
        jax=jax.__version__,
        platform_version=jax.devices()[0].client.platform_version.split("\n")[0],
    )


def write_results(path: str, tables: dict[str, Any]) -> None:
    """Writes JSON of the machine and of the tables, which may name another device."""
    pathlib.Path(path).write_text(json.dumps({**machine(), **tables}, indent=1) + "\n")
