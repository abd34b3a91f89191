"""Collects what the pages of the documentation show: commands, Python, links and configuration keys."""

import ast
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.command_lines import ROOT

PAGES = [ROOT / "README.md", ROOT / "experiments/README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_INDENTED = re.compile(r"(?:^(?: {4}.*)?\n)+", re.M)


@dataclass(frozen=True)
class Command:
    """A command of a code block: `python -m MODULE ARGUMENTS` or `make ARGUMENTS`."""

    page: Path
    module: str  # "make" for make
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.module} {' '.join(self.arguments)}"


def python_blocks(page: Path) -> list[str]:
    return [code for language, code in _FENCED.findall(page.read_text()) if language == "python"]


def commands(page: Path) -> list[Command]:
    """The commands of a page's code blocks, fenced or indented, or of those in the docstring of a Python file.

    What is optional, [--flag=value], is taken to be there.
    """
    text = page.read_text()
    if page.suffix == ".py":
        text = (ast.get_docstring(ast.parse(text)) or "") + "\n"
    blocks = [code for language, code in _FENCED.findall(text) if language in ("", "sh", "bash")]
    blocks += _INDENTED.findall(_FENCED.sub("", text))
    return [found for block in blocks for found in commands_of_block(page, block)]


def commands_of_block(page: Path, block: str) -> list[Command]:
    """The commands of a block's lines."""
    found = []
    block = re.sub(r"\s*\\\n\s*|\n\s+(?=\[)", " ", block)  # a line that goes on, by a backslash or an option
    for line in block.splitlines():
        match = re.match(r"\s*(?:[A-Z_]+=\S+ )*(?:(make)|python -m ([\w.]+))(?: +(.*))?$", line)
        if match:
            arguments = [_without_brackets(word) for word in shlex.split(match[3] or "", comments=True)]
            found.append(Command(page, match[1] or match[2], tuple(word for word in arguments if word != "...")))
    return found


def _without_brackets(word: str) -> str:
    return re.sub(r"^\[(--.*?)\]?$|^(--.*)\]$", lambda m: m[1] or m[2], word) if "--" in word else word.rstrip("]")
