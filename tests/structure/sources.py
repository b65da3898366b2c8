"""The Python files of a tree, parsed: what the rules of this folder look at."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("maxmoe", "pallas_kernels")
FOLDERS = (*PACKAGES, "configs", "tools", "tests")


@dataclasses.dataclass(frozen=True)
class Source:
    """One Python file: its path from the root, with forward slashes, its text and its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """The dotted name under which the file is imported."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def is_command(self) -> bool:
        """Whether the file is run with `python -m`: it has a main guard at its top level."""
        guards = (ast.unparse(node.test) for node in self.tree.body if isinstance(node, ast.If))
        return "__name__ == '__main__'" in guards


def sources(root: Path, folders: tuple[str, ...] = FOLDERS) -> Iterator[Source]:
    """Yields the Python files of some folders of a root, sorted by path; folders may be absent."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            text = path.read_text("utf-8")
            yield Source(path.relative_to(root).as_posix(), text, ast.parse(text, str(path)))
