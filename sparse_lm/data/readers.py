"""Reads the documents of one file: text, JSON lines, a JSON array or Parquet, compressed or not."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from sparse_lm.errors import DataError

try:
    from compression import zstd  # Python 3.14
except ImportError:
    from backports import zstd

COMPRESSIONS = {".gz": gzip.open, ".zst": zstd.open}  # which read every member or frame, and refuse one that is cut off
LINES, JSON, PARQUET = (".jsonl", ".ndjson"), ".json", ".parquet"  # files of any other suffix are text
PIECE = 64 * 1024  # characters; a longer text file becomes several documents
HEAD = 8192  # bytes in which to look if a file is text
PARQUET_ROWS = 1024  # read at one time


def split_suffix(path: Path) -> tuple[str, str]:
    """Returns the suffix that says what a file holds, and that of its compression; either may be empty."""
    compression = path.suffix.lower() if path.suffix.lower() in COMPRESSIONS else ""
    return (path.with_suffix("") if compression else path).suffix.lower(), compression


def read_documents(path: Path, text_field: str) -> Iterator[str]:
    """Yields the documents of a file, which may be empty.

    A text file of more than `PIECE` characters is cut at line ends. Bytes that are not UTF-8 read as U+FFFD.
    `text_field` is the field of a JSON record, or column of a Parquet file, that holds its text.

    Raises:
      DataError: the file cannot be read, is no text, or a record has no such text; null is an empty one.
    """
    suffix, compression = split_suffix(path)
    try:
        if suffix == PARQUET and not compression:
            yield from _parquet_texts(path, text_field)
            return
        if compression and not path.stat().st_size:
            raise EOFError("the file is empty, which no compressed file is")  # gzip would make an empty text of it
        opener = COMPRESSIONS.get(compression, open)
        with opener(path, "rt", encoding="utf-8-sig", errors="replace", newline="\n") as stream:
            head = stream.buffer.peek(HEAD)[:HEAD].removeprefix(codecs.BOM_UTF8)
            _check_text(head)
            if suffix == JSON and head.lstrip().startswith(b"["):
                for number, record in enumerate(_parse(stream.read(), str(path)), start=1):
                    yield _text(record, f"{path}:item {number}", text_field)
            elif suffix in (*LINES, JSON):
                for number, line in enumerate(stream, start=1):
                    if line.strip():
                        place = f"{path}:{number}"
                        yield _text(_parse(line, place), place, text_field)
            else:
                yield from pieces(stream, PIECE)
    except (OSError, EOFError, zlib.error, zstd.ZstdError) as error:
        raise DataError(f"cannot read {path}: {error}") from error


def pieces(stream: TextIO, limit: int) -> Iterator[str]:
    """Cuts a text into pieces of at most `limit` characters, after the last line end where there is one."""
    rest = ""
    while True:
        rest += stream.read(limit - len(rest))
        if len(rest) < limit:
            break
        cut = rest.rfind("\n") + 1 or limit
        yield rest[:cut]
        rest = rest[cut:]
    if rest:
        yield rest


def _check_text(head: bytes) -> None:
    """Raises OSError if a file that begins so is binary, or text of another encoding than UTF-8."""
    if b"\0" in head:
        raise OSError("it is binary, not text")
    text = head.decode("utf-8", "replace")
    if text.count("\ufffd") > len(text) / 3:
        raise OSError("it is not text in UTF-8")


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # the latter, and some of the former: more than Python takes
        raise DataError(f"{place}: not JSON that can be read: {error}") from error


def _text(record: Any, place: str, field: str) -> str:
    if not isinstance(record, dict):
        raise DataError(f"{place}: no record with fields but of type {type(record).__name__}")
    if field not in record:
        raise DataError(f"{place}: no text in field {field!r}; fields here: {', '.join(record) or 'none'}")
    text = "" if record[field] is None else record[field]
    if not isinstance(text, str):
        raise DataError(f"{place}: field {field!r} is no text but of type {type(text).__name__}")
    # JSON can spell half of a surrogate pair, which is no character: U+FFFD, as bytes that are none.
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _parquet_texts(path: Path, field: str) -> Iterator[str]:
    import pyarrow.parquet  # here, since it takes a while, and few corpora are in Parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if field not in (names := file.schema_arrow.names):
                raise DataError(f"{path}: no column {field!r}; columns: {', '.join(names)}")
            batches = file.iter_batches(PARQUET_ROWS, columns=[field])
            texts = (text for batch in batches for text in batch.column(0).to_pylist())
            for number, text in enumerate(texts, start=1):
                yield _text({field: text}, f"{path}:row {number}", field)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
