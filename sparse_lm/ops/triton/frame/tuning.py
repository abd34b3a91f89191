"""This backend's tuned configurations, as experiments/kernels/triton_backend.py --tune writes them."""

from __future__ import annotations

import functools
import pathlib

from sparse_lm.ops import tuned

PATH = pathlib.Path(__file__).with_name("tuned.json")

lookup = functools.partial(tuned.lookup, PATH)
