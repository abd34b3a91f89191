"""Text of another kind than the corpus, from folders of a system."""

import gzip
import types

from experiments.quality import other_text
from sparse_lm.data.corpus import TextFiles


def test_documents_are_texts_of_some_length_each_once(tmp_path, monkeypatch):
    long, longer = "On pages of manuals. " * 30, "Über Handbücher. " * 40
    (tmp_path / "share/pages").mkdir(parents=True)
    (tmp_path / "share/a.txt").write_text(long)
    (tmp_path / "share/pages/b.1.gz").write_bytes(gzip.compress(longer.encode()))
    (tmp_path / "share/short").write_text("short")
    (tmp_path / "share/binary").write_bytes(b"\xff" * 1000)
    (tmp_path / "share/zeros").write_bytes(bytes(1000))
    (tmp_path / "share/damaged.gz").write_bytes(gzip.compress(long.encode())[:-20])
    (tmp_path / "share/link").symlink_to(tmp_path / "share/a.txt")
    folders = [str(tmp_path / "share"), str(tmp_path / "none")]
    flags = types.SimpleNamespace(output=str(tmp_path / "other"), folders=folders, megabytes=1)
    monkeypatch.setattr(other_text, "flags", types.SimpleNamespace(FLAGS=flags))
    other_text.main([])
    written = list(TextFiles(tuple((tmp_path / "other").iterdir())))
    assert sorted(written) == sorted([long, longer]) and written == list(other_text.documents(folders))


def test_texts_are_shared_out_among_files(monkeypatch):
    monkeypatch.setattr(other_text, "CHARACTERS", 10)
    texts = [letter * 4 for letter in "abcdefgh"]
    assert list(other_text.files(texts, 22)) == [texts[:3], texts[3:5], texts[5:6]]
    assert list(other_text.files(texts[:4], 100)) == [texts[:3], texts[3:4]]
    assert list(other_text.files(texts[:3], 100)) == [texts[:3]]
