import json

import jax
import pytest

from sparse_lm.ops import tuned


@pytest.mark.parametrize(
    "kernel, shape, found", [("a", (1, 2, 3), 7), ("a", (3, 2, 1), 8), ("a", (1, 2), None), ("b", (1, 2, 3), None)]
)
def test_configurations_are_found_by_device_kernel_and_shape(kernel, shape, found, tmp_path):
    path, here = tmp_path / "tuned.json", jax.devices()[0].device_kind
    of_here = {"a": {"1x2x3": {"stages": 7}, "3x2x1": {"stages": 8}}}
    of_another = {"a": {"1x2x3": {"stages": 9}, "1x2": {"stages": 9}}, "b": {"1x2x3": {"stages": 9}}}
    path.write_text(json.dumps({f"not {here}": of_another, here: of_here}))
    assert tuned.lookup(path, kernel, shape, dict) == (found and {"stages": found})
