"""A source of a topology: a file that can be written, with older versions in files beside it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from sharded_orm.topology.document import Document
from sharded_orm.topology.sources.base import Process, Revision
from tests.integration.promotion.source import WritableFile


class FileWithHistory(WritableFile):
    """A writable file with a history. With the trouble ``slow`` it answers after the trouble ends."""

    def _wait(self) -> None:
        while self.trouble() == "slow" and not self._ended.wait(0.01):
            pass

    def publish(self, document: Document, *, expected: int, comment: str = "") -> None:
        self._wait()
        before = self._path.read_text()
        super().publish(document, expected=expected, comment=comment)
        self._of(expected).write_text(before)
        self._of(document.version).write_text(document.to_json())
        self._of(document.version).with_suffix(".comment").write_text(comment)

    def history(self, limit: int) -> list[Revision]:
        revisions = []
        for path in self._path.parent.glob(f"{self._path.stem}-*.json"):
            comment = path.with_suffix(".comment")
            text = comment.read_text() if comment.exists() else ""
            version = int(path.stem.rpartition("-")[2])
            published = datetime.fromtimestamp(path.stat().st_mtime, UTC)
            revisions.append(Revision(version, published, "somebody", text))
        return sorted(revisions, key=lambda revision: -revision.version)[:limit]

    def revision(self, version: int) -> Document:
        self._wait()
        path = self._of(version)
        if not path.exists():
            raise LookupError(f"{self.describe()} keeps no version {version!r}.")
        return Document.from_json(path.read_text())

    def processes(self) -> list[Process] | None:
        return [Process("web1", 7, self._read().version, None)]

    def _of(self, version: int) -> Path:
        return self._path.with_name(f"{self._path.stem}-{version}.json")
