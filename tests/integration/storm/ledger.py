"""What processes of the storm have written, by their own account.

Each process appends to a file of its own: a line before an operation, which names the rows that it
changes, and a line with the outcome. A line that was written survives SIGKILL. An operation without an
outcome was executed once or not at all.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

DONE, NOT_DONE, UNKNOWN = "done", "not done", "unknown"


class RowName(NamedTuple):
    """A row of the storm. No two processes write the same row."""

    table: str
    #: The shard key.
    owner: str
    #: A number that no other row of the table has.
    token: int


class Change(NamedTuple):
    """The change of one row; None stands for no row."""

    row: RowName
    old: Any
    new: Any


class Writing:
    """The ledger of this process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._number = 0
        self.outcomes: dict[str, int] = {}

    def begin(self, kind: str, changes: list[Change], counted: str = "") -> int:
        """:param counted: the owner whose counter the operation increments."""
        self._number += 1
        self._write("begin", self._number, kind, changes, counted)
        return self._number

    def end(self, number: int, outcome: str) -> None:
        self._write("end", number, outcome)

    def error(self, kind: str, began: float, error: BaseException) -> None:
        """Record an error that is allowed only if a server was down meanwhile."""
        text = f"{type(error).__name__}: {error}"[:500]
        self._write("error", kind, began, time.monotonic(), text)

    def moved(self, kind: str) -> None:
        self._write("moved", kind)

    def wrong(self, text: str) -> None:
        self._write("wrong", text)

    def reads(self, kind: str) -> None:
        self._write("read", kind)

    def _write(self, *values: Any) -> None:
        os.write(self._file, json.dumps(values).encode() + b"\n")


@dataclass
class RowState:
    """What a row may be, and the number of lines about it."""

    allowed: list[Any] = field(default_factory=lambda: [None])
    lines: int = 0


@dataclass
class _Operation:
    kind: str
    changes: list[Change]
    counted: str


class Ledgers:
    """The ledgers of all processes, read over and over."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._open: dict[tuple[Path, int], _Operation] = {}
        self.rows: dict[RowName, RowState] = {}
        #: By owner: increments that are executed for certain, and those that may be.
        self.least: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.errors: list[tuple[str, float, float, str]] = []
        self.problems: list[str] = []
        #: How often each kind of operation, read or error was seen.
        self.counts: dict[str, int] = {}

    def refresh(self) -> None:
        for path in sorted(self._folder.glob("*.ledger")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offsets[path] = self._offsets.get(path, 0) + len(line)
                    self._read(path, *json.loads(line))

    def unfinished(self) -> Iterator[list[Change]]:
        """Yield the changes of operations whose outcome is unknown: all of them or none."""
        for operation in self._open.values():
            yield operation.changes

    def _read(self, path: Path, what: str, *values: Any) -> None:
        if what == "begin":
            number, kind, rows, counted = values
            changes = [Change(RowName(*row), old, new) for row, old, new in rows]
            self._open[path, number] = _Operation(kind, changes, counted)
            for row, old, new in changes:
                state = self.rows.setdefault(row, RowState())
                state.allowed = [old, new]
                state.lines += 1
            if counted:
                self.most[counted] = self.most.get(counted, 0) + 1
        elif what == "end":
            number, outcome = values
            self._count(f"{self._open[path, number].kind}: {outcome}")
            if outcome == UNKNOWN:
                return
            operation = self._open.pop((path, number))
            for row, old, new in operation.changes:
                self.rows[row].allowed = [new if outcome == DONE else old]
                self.rows[row].lines += 1
            if operation.counted and outcome == DONE:
                self.least[operation.counted] = self.least.get(operation.counted, 0) + 1
            elif operation.counted:
                self.most[operation.counted] -= 1
        elif what == "error":
            self.errors.append(values)  # type: ignore[arg-type]
            self._count(f"{values[0]}: no connection")
        elif what == "wrong":
            self.problems.append(f"{path.name}: {values[0]}")
        else:
            self._count(f"{what} {values[0]}")

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
