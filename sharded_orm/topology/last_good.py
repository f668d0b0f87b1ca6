"""The last topology document that was in order, kept on disk for a start without its source."""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sharded_orm.exceptions import InvalidTopology
from sharded_orm.topology.document import Document


@dataclass(frozen=True)
class LastGoodCopy:
    """A file. All processes of a machine may share it, however many write at once.

    It is replaced as a whole, and only its owner may read it.
    """

    path: Path

    def read(self) -> Document | None:
        """The document; None when there is no file.

        :raises InvalidTopology: the file holds no document.
        :raises OSError: it cannot be read.
        """
        try:
            return Document.from_json(self.path.read_bytes())
        except FileNotFoundError:
            return None

    def saved_at(self) -> datetime | None:
        """When it was last written, as far as the file system tells."""
        with contextlib.suppress(OSError):
            return datetime.fromtimestamp(self.path.stat().st_mtime, UTC)
        return None

    def save(self, document: Document) -> None:
        """Write ``document``, unless the file holds it already, or a newer version.

        :raises OSError: the folder cannot be written.
        """
        # One that another account has written, as an operator's, is taken over.
        with contextlib.suppress(InvalidTopology, PermissionError):
            there = self.read()
            if there is not None and (there == document or there.version > document.version):
                return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Made with mode 0600, in the same folder: rename replaces in one step.
        descriptor, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(document.to_json())
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
