"""Fenced code blocks of the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
NOT_RUN = "<!-- not run by the tests"

_FENCE = re.compile(r"^(```+)(\S*)[^\n]*\n(.*?)^\1\s*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One block; ``line`` is the number of its first line of code."""

    path: Path
    line: int
    language: str
    code: str
    runs: bool

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def blocks(path: Path) -> Iterator[Block]:
    """Return the blocks of a page in order. ``runs`` is false below a comment that says so."""
    text = path.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        above = text[: match.start()].rstrip("\n")
        yield Block(
            path,
            text.count("\n", 0, match.start()) + 2,
            match[2],
            match[3],
            not above[above.rfind("\n") + 1 :].startswith(NOT_RUN),
        )


def pages() -> list[Path]:
    """Return the paths of all pages of the documentation, and of those beside its folder."""
    inside = (p for p in DOCS.rglob("*.md") if "_build" not in p.parts)
    beside = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
    return [*sorted(inside), *(ROOT / name for name in beside)]
