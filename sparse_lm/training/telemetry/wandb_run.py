"""A run on Weights & Biases. The package is optional, and imported only when a run is opened."""

from __future__ import annotations

import importlib.util
import os
import uuid
from pathlib import Path
from typing import Any

from sparse_lm.config import Config, to_dict
from sparse_lm.errors import UserError
from sparse_lm.files import replacing


class WandbError(UserError):
    """Weights & Biases is not installed, or would not open a run."""


def check_installed() -> None:
    """Raises WandbError if the package is not there; it is not imported."""
    if importlib.util.find_spec("wandb") is None:
        raise WandbError("--wandb: the package wandb is not installed; pip install wandb, or leave the flag out")


def open_run(workdir: str | os.PathLike, config: Config) -> Any:
    """Opens a run (`wandb.Run`), which resumed processes go on with: its id is kept in `<workdir>/wandb/run_id`.

    All else is Weights & Biases' own to configure, by its environment variables; WANDB_PROJECT is "sparse_lm" if not
    set. The workdir's name becomes the run's. Raises WandbError if the package refuses, such as for want of a login.
    """
    import wandb

    id_file = Path(workdir, "wandb", "run_id")
    if not id_file.exists():
        with replacing(id_file) as partial:
            partial.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
    try:
        return wandb.init(
            dir=workdir,
            project=os.environ.get("WANDB_PROJECT", "sparse_lm"),
            name=Path(workdir).name,
            config=to_dict(config),
            id=id_file.read_text(encoding="utf-8"),
            resume="allow",
        )
    except wandb.errors.Error as error:
        raise WandbError(f"--wandb: {error}") from error
