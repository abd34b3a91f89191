import gzip
import json
import random
import tracemalloc

import pyarrow.parquet
import pytest

from sparse_lm.data import corpus, readers
from sparse_lm.data.readers import zstd
from sparse_lm.errors import DataError
from tests.data.examples import make_documents, write_jsonl

TEXT = "one\r\ntwo\u2028 é 漢字\n\n\ttail without a line end"
COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstd.compress}


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_text_file_is_one_document_and_a_jsonl_file_has_one_a_line(tmp_path, compression):
    for suffix in (".py", ".TXT"):
        path = tmp_path / f"a{suffix}{compression}"
        path.write_bytes(COMPRESS[compression](TEXT.encode()))
        assert list(corpus.TextFiles((path,))) == [TEXT]
    documents = [*make_documents(5), TEXT]
    lines = "\n \n".join(json.dumps({"id": 1, "body": text}) for text in documents)
    path = tmp_path / f"a.jsonl{compression}"
    path.write_bytes(COMPRESS[compression](lines.encode()))
    assert list(corpus.TextFiles((path,), text_field="body")) == documents


def test_a_file_that_is_named_is_read_whatever_its_suffix_and_otherwise_by_its_kind(tmp_path):
    for name in ("page.html", "README", "log.txt.1", "a[1].cfg"):
        (tmp_path / name).write_text(name)
        assert list(corpus.find_files([f"{tmp_path}/{name}"])) == [name]
    write_jsonl(tmp_path / "settings.json", ["text"])
    assert list(corpus.find_files([f"{tmp_path}/settings.json"])) == ["text"]
    (tmp_path / "page.html.gz").write_bytes(gzip.compress(b"packed"))
    assert list(corpus.find_files([f"{tmp_path}/page.html.gz"])) == ["packed"]
    with pytest.raises(DataError, match=r"but 6 of other kinds, which must be named .*; \.json with one of these"):
        corpus.find_files([f"{tmp_path}/*"])


def write_parquet(path, **columns) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=4)


def test_a_parquet_file_has_a_document_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PARQUET_ROWS", 3)
    documents = [*make_documents(10), "", TEXT]
    write_parquet(tmp_path / "a.parquet", url=["x"] * 12, text=documents)
    write_parquet(tmp_path / "b.parquet", text=pyarrow.array(documents, pyarrow.large_string()).dictionary_encode())
    write_parquet(tmp_path / "c.parquet", body=documents)
    present = [text for text in documents if text]
    assert list(corpus.find_files([f"{tmp_path}/[ab].parquet"])) == present * 2
    assert list(corpus.find_files([f"{tmp_path}/c.parquet"], text_field="body")) == present
    with pytest.raises(DataError, match=r"c\.parquet: no column 'text'; columns: body"):
        list(corpus.find_files([f"{tmp_path}/c.parquet"]))
    write_parquet(tmp_path / "d.parquet", text=["x", None, "y"])
    assert list(corpus.find_files([f"{tmp_path}/d.parquet"])) == ["x", "y"]
    write_parquet(tmp_path / "d.parquet", text=[None] * 5 + [7])
    with pytest.raises(DataError, match=r"d\.parquet:row 6: field 'text' is no text but of type int"):
        list(corpus.find_files([f"{tmp_path}/d.parquet"]))


def test_a_json_array_has_a_document_an_item(tmp_path):
    path, texts = tmp_path / "a.json.gz", [*make_documents(5), "", TEXT]
    content = json.dumps([{"id": [1, {}], "text": text} for text in texts], indent=1)
    path.write_bytes(gzip.compress(f"\n {content}\n".encode()))
    assert list(corpus.find_files([f"{path}"])) == [text for text in texts if text]
    for damaged in (content[:-1], content + "{}"):
        path.write_bytes(gzip.compress(damaged.encode()))
        with pytest.raises(DataError, match=r"a\.json\.gz: not JSON that can be read"):
            list(corpus.find_files([f"{path}"]))


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_byte_order_mark_is_no_text(tmp_path, compression):
    contents = {"a.txt": TEXT, "a.jsonl": json.dumps({"text": TEXT}), "a.json": json.dumps([{"text": TEXT}])}
    for name, content in contents.items():
        path = tmp_path / f"{name}{compression}"
        path.write_bytes(COMPRESS[compression](content.encode("utf-8-sig")))
        assert list(corpus.find_files([str(path)])) == [TEXT]


def test_a_zst_file_that_is_cut_off_is_refused_wherever_it_is_cut(tmp_path):
    frames = [zstd.compress(b"a" * 300_000), zstd.compress(random.Random(0).randbytes(300).hex().encode())]
    whole, path = b"".join(frames), tmp_path / "a.txt.zst"
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        if size in (len(frames[0]), len(whole)):
            assert "".join(corpus.TextFiles((path,))).startswith("aaaa")
        else:
            with pytest.raises(DataError, match=r"cannot read .*a\.txt\.zst"):
                list(corpus.TextFiles((path,)))


def test_a_large_file_is_streamed(tmp_path):
    line = b"some text that compresses well\n"
    path = tmp_path / "large.txt.zst"
    path.write_bytes(zstd.compress(line * 1_000_000))  # 31 MB of text
    tracemalloc.start()
    size = sum(map(len, corpus.TextFiles((path,))))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == 1_000_000 * len(line)
    assert peak < 4e6


def test_files_come_sorted_and_once_however_their_paths_are_spelled(tmp_path, monkeypatch):
    (tmp_path / "d").mkdir()
    for name in ("a.txt", "c.txt", "d/e.md", "d/ignored.bin"):
        (tmp_path / name).write_text(name)
    (tmp_path / "b.txt").symlink_to("c.txt")
    (tmp_path / "here").symlink_to(".")
    monkeypatch.chdir(tmp_path)
    patterns = ["./*.txt", f"{tmp_path}/**/*", "here/a.txt", "../*/c.txt"]
    for order in (patterns, patterns[::-1]):
        found = corpus.find_files(order)
        assert sorted(found) == ["a.txt", "c.txt", "d/e.md"]
        assert found.paths == tuple(sorted(found.paths)) == corpus.find_files(patterns).paths


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"tex', "a.jsonl:2: not JSON"),
        ("a.jsonl", b'{"text": "x", "id": %s}' % (b"[" * 100_000), "a.jsonl:1: not JSON that can be read: maximum rec"),
        ("a.jsonl", b'{"body": "x", "id": 3}', "a.jsonl:1: no text in field 'text'; fields here: body, id"),
        ("a.jsonl", b"[1]", "a.jsonl:1: no record with fields but of type list"),
        ("a.jsonl", b'{"text": 7}', "a.jsonl:1: field 'text' is no text but of type int"),
        ("a.txt.gz", b"plain", "cannot read .*a.txt.gz"),
        ("a.txt.gz", gzip.compress(b"cut off" * 100, mtime=0)[:-9], "cannot read .*a.txt.gz"),
        ("a.jsonl.zst", b"", "cannot read .*a.jsonl.zst: the file is empty"),
        ("image", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "cannot read .*image: it is binary, not text"),
        ("utf16.ndjson", json.dumps({"text": TEXT}).encode("utf-16"), "cannot read .*utf16.ndjson: it is binary"),
        ("utf16.txt", TEXT.encode("utf-16"), "cannot read .*utf16.txt: it is binary, not text"),
        ("a.txt", "\u0422\u0435\u043a\u0441\u0442 in all".encode("cp1251"), "read .*a.txt: it is not text in UTF-8"),
        ("a.parquet", b"PAR1 and no more", "cannot read .*a.parquet"),
    ],
)
def test_unreadable_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(corpus.find_files([f"{tmp_path}/{name}"]))


def test_patterns_without_text_and_links_that_lead_nowhere_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"'.*nothing.*' matches no file of text; readable: \.txt \.py \.md \.jsonl"):
        corpus.find_files([f"{tmp_path}/nothing*"])
    with pytest.raises(DataError, match=rf"a directory, whose files are '{tmp_path}/\*\*/\*'"):
        corpus.find_files([str(tmp_path)])
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "picture.png").symlink_to("gone")
    assert len(corpus.find_files([f"{tmp_path}/*"]).paths) == 1
    (tmp_path / "b.txt.gz").symlink_to("gone")
    with pytest.raises(DataError, match=r"b\.txt\.gz is a link that leads to no file"):
        corpus.find_files([f"{tmp_path}/*"])


def test_halves_of_surrogate_pairs_read_as_bytes_that_are_no_text(tmp_path):
    (tmp_path / "a.ndjson").write_text(r'{"text": "\ud83d caf\u00e9 \ude00 \ud83d\ude00"}')
    assert list(corpus.find_files([f"{tmp_path}/*"])) == ["\ufffd caf\u00e9 \ufffd \U0001f600"]


def test_what_a_pattern_leaves_out_is_said(tmp_path, caplog):
    caplog.set_level("INFO")
    for name in ("a.txt", "b.jsonl", "c.bz2", "d.rst", "e.rst", "f"):
        (tmp_path / name).write_text("{}")
    corpus.find_files([f"{tmp_path}/*.txt"])
    assert not caplog.text
    corpus.find_files([f"{tmp_path}/*"])
    assert "2 files of text; 4 of other kinds are left out: .bz2, .rst, f" in caplog.text
