"""A topology source in a writable file, with the faults of a real source."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from sharded_orm.exceptions import TopologyConflict, TopologyUnavailable
from sharded_orm.topology.document import Document
from sharded_orm.topology.sources.base import OnChange, TopologySource

_POLL = 0.01  # seconds


class WritableFile(TopologySource):
    """A topology source with the option ``PATH``. A file beside it names the fault that a test
    sets.

    ======= ==================================================================
    lost    the document is published, and the answer does not arrive
    refused nothing is published, and no answer arrives
    down    nothing answers
    ======= ==================================================================
    """

    writable: ClassVar[bool] = True
    option_names: ClassVar[frozenset[str]] = frozenset({"PATH"})
    required: ClassVar[frozenset[str]] = frozenset({"PATH"})

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]  # the arguments of the base class
        self._path = Path(self.options["PATH"])
        self._ended = threading.Event()

    def describe(self) -> str:
        return str(self._path)

    def trouble(self) -> str:
        try:
            return self._path.with_suffix(".trouble").read_text().strip()
        except FileNotFoundError:
            return ""

    def load(self) -> Document | None:
        if self.trouble() == "down":
            raise TopologyUnavailable("the file does not answer")
        return self._read()

    def _read(self) -> Document:
        return Document.from_json(self._path.read_bytes())

    def publish(self, document: Document, *, expected: int, comment: str = "") -> None:
        trouble = self.trouble()
        if trouble in ("down", "refused"):
            raise TopologyUnavailable("no answer")
        with self._locked():
            if self._read().version != expected:
                raise TopologyConflict(f"it is not version {expected} any more")
            replace_file(self._path, document.to_json())
        if trouble == "lost":
            raise TopologyUnavailable("the answer was lost")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self._path.with_suffix(".lock"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def start(self, on_change: OnChange) -> None:
        def follow() -> None:
            known = None
            while not self._ended.wait(_POLL):
                changed = self._path.stat().st_mtime_ns
                if changed != known:
                    known = changed
                    on_change(self._read())

        threading.Thread(target=follow, daemon=True).start()

    def stop(self) -> None:
        self._ended.set()


def replace_file(path: Path, text: str) -> None:
    """Replace a file in one step, for processes that read it at the same time."""
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(text)
    os.replace(draft, path)
