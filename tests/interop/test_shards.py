"""Safetensors in one file and in several; test_pretrained.py reads them back."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from sparse_lm.interop.shards import open_tensors, write_shards

SHAPES = {"a": (4, 8), "b": (100,), "c": (2, 4, 16), "d": (1,), "e": (60,), "f": (3, 3)}


def make_tensors(seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def test_several_files_and_their_index(tmp_path):
    """A file holds at most 400 bytes, or one tensor: b alone is 400, c 512."""
    tensors = make_tensors()
    write_shards(tmp_path, tensors, 400)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-{i:05}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o644}  # others read them, too
    assert [list(load_file(file)) for file in files] == [["a"], ["c"], ["b"], ["d", "e", "f"]]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in tensors.values())
    assert {name: load_file(tmp_path / file)[name].shape for name, file in index["weight_map"].items()} == SHAPES


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"lacks model\.safetensors"):
        open_tensors(tmp_path)
    write_shards(tmp_path, make_tensors(), 400)
    (tmp_path / "model-00002-of-00004.safetensors").write_bytes(b"no such thing")
    with pytest.raises(ValueError, match=r"model-00002-of-00004\.safetensors cannot be read"):
        open_tensors(tmp_path)
    (tmp_path / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks model-00002-of-00004\.safetensors"):
        open_tensors(tmp_path)


def test_other_weights_beside_the_model_are_not_its_own(tmp_path):
    write_shards(tmp_path, make_tensors(), 10**6)
    (tmp_path / "other").mkdir()
    write_shards(tmp_path / "other", make_tensors(1), 10**6)
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "model_ema.safetensors")
    stored = open_tensors(tmp_path)
    for name, array in make_tensors().items():
        np.testing.assert_array_equal(stored[name][:], array)


def test_one_file_is_read_before_an_index_of_older_ones(tmp_path):
    write_shards(tmp_path, make_tensors(1), 400)
    write_shards(tmp_path, make_tensors(), 10**6)
    np.testing.assert_array_equal(open_tensors(tmp_path)["b"][:], make_tensors()["b"])
