"""Steps that runs of `slices` have in common, which are trained once for all of a seed on one GPU.

"slices_80" and "slices_stay" are one run until the phase is left or the rate falls. So each goes on from a run of these
steps, which goes on from the longest such run that is there: the queue of a GPU should name the run that parts first
first, as in slices_80, slices_90, slices_stay. Each counts the time of all of its steps.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path

from flax.traverse_util import flatten_dict

from experiments.quality.suites import first_steps
from sparse_lm.config import Config, to_dict
from sparse_lm.training.workdir import RESUMABLE_CHANGES

PREFIX = "slices_"  # of the names of these runs


def first_part(config: Config, name: str) -> Config:
    """Returns the configuration of the steps at a constant rate, up to where the phase is left or the rate falls."""
    sparsity = config.sparsity
    steps = min(sparsity.end_step, config.steps - config.optimizer.decay_steps)
    routed = dataclasses.replace(sparsity, end_step=steps, leave=False)
    return first_steps(config, steps, sparsity=routed)


def directory(root: Path, first: Config) -> Path:
    """Returns where these steps are trained: it has the name of what decides them, less their number, and the GPU."""
    keys = flatten_dict(to_dict(first), sep=".")
    for key in RESUMABLE_CHANGES | {"sparsity.end_step"}:
        keys.pop(key, None)
    deciding = hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:8]
    return root / f"common-{first.seed}-gpu{os.environ.get('CUDA_VISIBLE_DEVICES', '')}-{deciding}@{first.steps}"


def of_steps(steps: int, workdir: Path) -> Path:
    """Returns where so many of the steps of `workdir` are trained."""
    return workdir.with_name(f"{workdir.name.split('@')[0]}@{steps}")


def most_before(steps: int, workdir: Path, row: str) -> int:
    """Returns how many of the steps of `workdir` are trained, but not all; finished runs have a file `row`."""
    done = (path.parent.name.split("@")[1] for path in workdir.parent.glob(f"{of_steps(0, workdir).name[:-1]}*/{row}"))
    return max((n for n in map(int, done) if n < steps), default=0)
