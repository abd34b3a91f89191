"""Lists what can be run here: `python -m experiments`.

Each line is a command and what it does, the first sentence of the module's docstring.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent


def commands() -> Iterator[tuple[str, str]]:
    """Yields module and first sentence of all that has a `main`, without importing any of it."""
    for path in sorted(HERE.rglob("*.py")):
        source = path.read_text()
        if path != Path(__file__) and "__name__ ==" in source:
            module = ".".join(path.relative_to(HERE.parent).with_suffix("").parts)
            paragraph = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0]
            yield module, " ".join(paragraph.split())


def main() -> None:
    for module, sentence in commands():
        print(f"python -m {module}\n    {sentence}")


if __name__ == "__main__":
    main()
