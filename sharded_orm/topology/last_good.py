"""The last good copy: a file with the last valid topology document.

A process can start with this copy if the topology source does not answer.
"""

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
    """The file at ``path`` that contains the last valid topology document.

    All processes of a machine may share the file and write it at the same time, because each write
    replaces the whole file. Only the file's owner may read it.
    """

    path: Path

    def read(self) -> Document | None:
        """Return the topology document in the file; None if the file does not exist.

        :raises InvalidTopology: the file does not contain a document.
        :raises OSError: the file cannot be read.
        """
        try:
            return Document.from_json(self.path.read_bytes())
        except FileNotFoundError:
            return None

    def saved_at(self) -> datetime | None:
        """Return the time at which the copy was last saved; None if the time is unknown."""
        with contextlib.suppress(OSError):
            return datetime.fromtimestamp(self.path.stat().st_mtime, UTC)
        return None

    def save(self, document: Document) -> None:
        """Write ``document`` to the file, unless the file already contains it or a newer version.

        :raises OSError: the file or its folder cannot be read or written.
        :raises TypeError: the document contains a value that JSON cannot represent, such as a date.
        """
        # Replace an existing file even if its content is invalid. Also replace the file if it
        # cannot be read because it belongs to another account, such as an operator's.
        with contextlib.suppress(InvalidTopology, PermissionError):
            saved = self.read()
            if saved is not None and (saved == document or saved.version > document.version):
                return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # First write to a temporary file (mode 0600). It must be in the same folder, so that
        # os.replace() can replace the old file in one step.
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
