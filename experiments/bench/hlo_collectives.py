"""Reads the collectives of a compiled program from its HLO text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf" = (?P<results>.*?) (?P<kind>{_KINDS})(?P<start>-start)?\(")
_LOOP = re.compile(r" while\(.*body=%?(?P<body>[\w.\-]+).*\"known_trip_count\":\{\"n\":\"(?P<count>\d+)\"")
_DEVICES = re.compile(r"(?:replica_groups|source_target_pairs)=(.+?), [a-z_]+=")
_ARRAY = re.compile(r"(?P<dtype>pred|[a-z]+\d+)\[(?P<sizes>[\d,]*)\]")


class Collective(NamedTuple):
    """One instruction.

    Attributes:
      kind: "all-gather", "all-reduce", "reduce-scatter", "all-to-all" or "collective-permute".
      devices: the groups of devices that take part, as HLO writes them.
      shapes: of its results on one device.
      bytes: of its results on one device.
      times: how often it runs: in the body of a loop, once for each turn of that and of the loops around it.
      scope: the name of the operation that it came from.
    """

    kind: str
    devices: str
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    times: int
    scope: str


def collectives(program: str) -> Iterator[Collective]:
    """Yields those of an HLO module, in the order in which they stand there."""
    bodies = dict(_computations(program))
    loops = {
        loop["body"]: (name, int(loop["count"]))
        for name, body in bodies.items()
        for loop in filter(None, map(_LOOP.search, body))
    }

    def times(name: str) -> int:
        around, turns = loops.get(name, (None, 1))
        return turns if around is None else turns * times(around)

    for name, body in bodies.items():
        for line in body:
            if found := _COLLECTIVE.search(line):
                arrays = _results(found)
                yield Collective(
                    kind=found["kind"],
                    devices=_DEVICES.search(line)[1],
                    shapes=tuple(shape for _, shape in arrays),
                    bytes=sum(_bits(dtype) * int(np.prod(shape)) // 8 for dtype, shape in arrays),
                    times=times(name),
                    scope=line.partition('op_name="')[2].partition('"')[0],
                )


def _computations(program: str) -> Iterator[tuple[str, list[str]]]:
    """Yields (name, instructions) of each computation."""
    name, body = "", []
    for line in program.splitlines():
        if found := _COMPUTATION.match(line):
            name, body = found["name"], []
        elif line == "}":
            yield name, body
        else:
            body.append(line)


def _results(found: re.Match[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Returns (dtype, shape) of each result. An asynchronous start lists the operands first, save an all-reduce's."""
    arrays = [
        (array["dtype"], tuple(int(size) for size in array["sizes"].split(",") if size))
        for array in _ARRAY.finditer(found["results"])
    ]
    with_operands = found["start"] and (found["kind"] != "all-reduce" or found["results"].startswith("(("))
    return arrays[len(arrays) // 2 :] if with_operands else arrays


def _bits(dtype: str) -> int:
    return 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
