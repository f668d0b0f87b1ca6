"""The last valid topology document, kept on disk for a start without its source."""

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
    """A file with the last valid document.

    All processes of a machine may share it, and write it at the same time: each write replaces the
    whole file. Only its owner may read it.
    """

    path: Path

    def read(self) -> Document | None:
        """The document; None if there is no file.

        :raises InvalidTopology: the file holds no document.
        :raises OSError: the file cannot be read.
        """
        try:
            return Document.from_json(self.path.read_bytes())
        except FileNotFoundError:
            return None

    def saved_at(self) -> datetime | None:
        """When the file was last written; None if the file system cannot say."""
        with contextlib.suppress(OSError):
            return datetime.fromtimestamp(self.path.stat().st_mtime, UTC)
        return None

    def save(self, document: Document) -> None:
        """Write ``document``, unless the file holds it already, or a newer version.

        :raises OSError: the folder cannot be written.
        """
        # A file of another account, an operator's for example, is replaced.
        with contextlib.suppress(InvalidTopology, PermissionError):
            saved = self.read()
            if saved is not None and (saved == document or saved.version > document.version):
                return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The temporary file has mode 0600 and is in the same folder, so a rename replaces the file.
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
