"""A run on Weights & Biases. The package is optional, and imported only when a run is opened."""

from __future__ import annotations

import importlib.util
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

from sparse_lm.config import Config, to_dict
from sparse_lm.files import replacing

PROJECT = "sparse_lm"


class WandbError(RuntimeError):
    """Weights & Biases is not installed, or would not open a run."""

    def __init__(self, reason: str):
        super().__init__(f"--wandb: {reason}")


def check_installed() -> None:
    """Finds the package without importing it.

    Raises:
      WandbError: it is not there.
    """
    if importlib.util.find_spec("wandb") is None:
        raise WandbError("the package wandb is not installed; pip install wandb, or leave the flag out")


class WandbRun:
    """One run, which resumed processes go on with: its id is kept in `<workdir>/wandb/run_id`.

    All else is Weights & Biases' own to configure, by its environment variables: WANDB_MODE=offline
    writes below `<workdir>/wandb` only, WANDB_PROJECT is "sparse_lm" if not set.

    Args:
      workdir: an existing directory; its name becomes the run's.
      config: the run's.

    Raises:
      WandbError: the package is missing, or refuses, such as for want of a login.
    """

    def __init__(self, workdir: str | os.PathLike, config: Config):
        check_installed()
        import wandb

        project = os.environ.get("WANDB_PROJECT", PROJECT)
        try:
            self._run = wandb.init(
                dir=workdir, project=project, name=Path(workdir).name, config=to_dict(config),
                id=_run_id(workdir), resume="allow",
            )  # fmt: skip
        except wandb.errors.Error as error:
            raise WandbError(str(error)) from error

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Logs one step. Weights & Biases ignores steps that an earlier process has logged."""
        self._run.log(dict(scalars), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _run_id(workdir: str | os.PathLike) -> str:
    path = Path(workdir, "wandb", "run_id")
    if not path.exists():
        with replacing(path) as partial:
            partial.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
    return path.read_text(encoding="utf-8")
