"""The tutorial, executed: its files are written, its commands run, its sessions compared."""

from __future__ import annotations

import doctest
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.distribution import Installation
from tests.docs.markdown import DOCS, Block, blocks

TUTORIALS = sorted(p for p in (DOCS / "tutorial").glob("*.md") if p.name != "index.md")
APPENDED = " (at the end)"
SHELL = Path(__file__).with_name("shell.py")


class Project:
    """A folder in which a tutorial is followed, with the package as its users install it."""

    def __init__(self, folder: Path, installation: Installation) -> None:
        self.folder = folder
        self._installation = installation

    def run(self, arguments: list[str], given: str | None = None) -> tuple[int, str]:
        done = self._installation.run(arguments, self.folder, given)
        return done.returncode, done.stdout

    def write(self, block: Block) -> None:
        name = block.code.partition("\n")[0].removeprefix("# ")
        path = self.folder / name.removesuffix(APPENDED)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if name.endswith(APPENDED) else "w", encoding="utf-8") as file:
            file.write("\n" + block.code)

    def console(self, block: Block) -> None:
        for command, expected in commands(block.code):
            words = shlex.split(command)
            assert words[0] == "python", f"{block}: only python is run, not {command!r}"
            code, output = self.run(words[1:])
            assert code == 0, f"{block}: {command}\n{output}"
            assert doctest.OutputChecker().check_output(expected, output, doctest.ELLIPSIS), (
                f"{block}: {command}\nprinted\n{output}\nnot\n{expected}"
            )

    def session(self, several: list[Block], before: str = "") -> None:
        # Keeps the line numbers of the page, so that a failure names the place.
        text = before
        for block in several:
            text += "\n" * (block.line - 1 - text.count("\n")) + block.code
        # Its code, not its path: beside the path are other modules of the tests.
        code, output = self.run(["-c", SHELL.read_text(), "photosite.settings"], text)
        assert code == 0, f"{several[0].path}\n{output}"


def commands(code: str) -> Iterator[tuple[str, str]]:
    """Return the commands of a console block, each with its output."""
    for part in ("\n" + code).split("\n$ ")[1:]:
        command, _, output = part.partition("\n")
        yield command, output if output.endswith("\n") or not output else output + "\n"


def steps(path: Path) -> Iterator[list[Block]]:
    """Return the blocks of a page; adjacent parts of a session are joined."""
    session: list[Block] = []
    for block in blocks(path):
        if block.language == "pycon":
            session.append(block)
            continue
        if session:
            yield session
            session = []
        yield [block]
    if session:
        yield session


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial(path: Path, tmp_path: Path, installation: Installation) -> None:
    project = Project(tmp_path, installation)
    for step in steps(path):
        match step[0]:
            case Block(runs=False):
                pass
            case Block(language="python"):
                project.write(step[0])
            case Block(language="console"):
                project.console(step[0])
            case Block(language="pycon"):
                project.session(step)
            case other:
                pytest.fail(f"{other}: what is a block of {other.language!r}?")
