"""Tests of this folder check calls of the public ops against the shapes of their annotations."""

import inspect

from sparse_lm import ops
from sparse_lm.ops import row_order
from tests.annotations import check_calls, checked_annotations, unchecked  # noqa: F401

check_calls(ops, [name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))])
check_calls(row_order, ["dispatch", "take_rows", "combine"])
