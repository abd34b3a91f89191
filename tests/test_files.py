import pytest

from sparse_lm.files import replacing


def test_a_file_is_replaced_when_it_is_complete(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as partial:
        partial.write_text("new")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    with replacing(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
