"""Zstandard files (RFC 8878), refused if they are cut off.

The library decompresses what there is of a file and says nothing about what is missing, which is how
a shard looks whose download was stopped.
"""

from __future__ import annotations

from typing import BinaryIO

import zstandard

LONGEST_FRAME_HEADER = 18
SKIPPABLE = range(0x184D2A50, 0x184D2A60)  # magic numbers of frames with something else than data
RLE_BLOCK = 1
CHECKSUM_BYTES = 4


def open_zst(file: BinaryIO) -> BinaryIO:
    """`file` decompressed: all its frames, of which files that were written in parallel hold several.

    Raises:
      EOFError: the file is cut off.
      zstandard.ZstdError: it is no such file.
    """
    check_complete(file)
    file.seek(0)
    return zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)


def check_complete(file: BinaryIO) -> None:
    """Goes from block to block, by their sizes alone, to the end of the file.

    Raises:
      EOFError: the last frame is not whole.
      zstandard.ZstdError: there is something else than a frame.
    """
    end = file.seek(0, 2)
    position = 0
    while position < end:
        position = _frame_end(file, position)
    if position > end:
        raise EOFError("the file is cut off")


def _frame_end(file: BinaryIO, position: int) -> int:
    header = _read(file, position, LONGEST_FRAME_HEADER)
    if int.from_bytes(header[:4], "little") in SKIPPABLE:
        return position + 8 + int.from_bytes(header[4:8], "little")
    position += zstandard.frame_header_size(header)
    last = False
    while not last:
        block = int.from_bytes(_read(file, position, 3).ljust(3, b"\1"), "little")
        last, kind, size = bool(block & 1), block >> 1 & 3, block >> 3
        position += 3 + (1 if kind == RLE_BLOCK else size)
    return position + CHECKSUM_BYTES * zstandard.get_frame_parameters(header).has_checksum


def _read(file: BinaryIO, position: int, size: int) -> bytes:
    file.seek(position)
    return file.read(size)
