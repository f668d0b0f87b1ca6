"""The file that saves transactions and rows that only one side of a pair has.

It is written before the side's rows are replaced by those of the other side.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharded_orm.operations.exceptions import PairRefused
from sharded_orm.operations.pairs.side_rows import RowDifference

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.binary_log import LoggedTransaction


class PutAsideFile:
    """A new file with one JSON text per line.

    The first line describes the file. One line for each transaction follows, and then one line for
    each row that differs between the sides.

    Only the owner of the process can read the file.

    :param folder: an existing folder.
    :param node: the side whose transactions and rows are saved.
    :param survivor: the other side.
    """

    def __init__(self, folder: Path, node: str, survivor: str) -> None:
        self._moment = datetime.now(UTC)
        self._head = {"node": node, "survivor": survivor, "at": self._moment.isoformat()}
        name = f"{node}-{self._moment:%Y%m%dT%H%M%S%f}.jsonl"
        self.path = (folder / name).absolute()

    def write(
        self, transactions: Iterable[LoggedTransaction], differences: Iterable[RowDifference]
    ) -> None:
        """Write the file, and wait until the disk has it.

        :raises PairRefused: the file cannot be written.
        """
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                lines: Iterable[dict[str, Any]] = (
                    self._head,
                    *(
                        {
                            "transaction": t.gtid,
                            "tables": list(t.tables),
                            "statements": t.statements,
                        }
                        for t in transactions
                    ),
                )
                for line in lines:
                    file.write(_json(line))
                for each in differences:
                    file.write(_json(each._asdict()))
                file.flush()
                os.fsync(descriptor)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as exc:
            raise PairRefused(
                [
                    f"{str(self.path)!r} cannot be written ({exc}); nothing was changed: name another folder"
                ]
            ) from exc


def _json(line: dict[str, Any]) -> str:
    return json.dumps(line, ensure_ascii=False, default=_plain) + "\n"


def _plain(value: Any) -> Any:
    """Return bytes as text if they are UTF-8; otherwise return hexadecimal digits."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"hex": value.hex()}
    return str(value)
