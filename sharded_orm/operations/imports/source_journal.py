"""Tables and triggers on an import's source: the journal and the fence.

The journal records which rows change, so that an import can copy their new values later. The fence
refuses all writes to the imported tables once it is closed.
docs/decisions/0034-following-a-source.md describes the entries of the journal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import md5
from typing import Any, Final, Self

from django.core.exceptions import ValidationError
from django.db import connections, models
from django.db.models import Field
from django.utils.module_loading import import_string

from sharded_orm.backends.change_capture import (
    EVENTS,
    CapturedTable,
    Change,
    ChangeCapture,
    trigger_name,
)
from sharded_orm.exceptions import MoveRefused
from sharded_orm.models.sharding.options import target_field
from sharded_orm.operations.exceptions import ImportRefused
from sharded_orm.operations.imports.request import ImportRequest
from sharded_orm.operations.imports.source_tables import SourceTable

#: A trigger cannot be created or dropped while a transaction that uses its table is open. This is
#: the largest number of seconds to wait for such transactions.
TRIGGER_PATIENCE: Final = 30.0
# The classes that create triggers on the source of an import, keyed by the source's vendor. They
# are named here because the source usually has one of Django's own backends, which know nothing of
# triggers.
_CAPTURES = {
    "mysql": "sharded_orm.backends.mysql.change_capture.MySQLChangeCapture",
    "postgresql": "sharded_orm.backends.postgresql.change_capture.PostgreSQLChangeCapture",
    "sqlite": "sharded_orm.backends.sqlite3.change_capture.SQLiteChangeCapture",
}
# Field classes whose values a trigger can record as text. Their method to_python() converts the
# text back to the same value.
_RECORDABLE = (models.IntegerField, models.CharField, models.TextField, models.UUIDField)


class SourceJournal:
    """Creates and reads two things in the database from which an import copies, the *source*.

    The journal of changes records which rows of the imported tables change. The fence makes these
    tables refuse writes once it is closed; all tables of a group share one fence. To be used by one
    thread, as a context manager that closes its database session at the end.

    :raises ImportRefused: the library cannot create triggers with the backend of the source.
    """

    def __init__(self, request: ImportRequest) -> None:
        self._tables = {table.model._meta.db_table: table for table in request.tables}
        self._group = request.group
        self._source = request.source
        digest = md5(request.group.encode(), usedforsecurity=False).digest()
        # This number marks the entries of the group in the journal, and the triggers of the group's
        # fence, which refuse writes. It is computed from the group's name, so that every process
        # finds the same number.
        self._number = int.from_bytes(digest[:7])
        self._capture = _open_capture(request.source)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._capture.__exit__(*exc_info)

    def check(self) -> None:
        """Check that triggers can record the changes of the import's source. Changes nothing there.

        :raises ImportRefused: the changes cannot be recorded. The error lists every reason.
        """
        problems = list(self._problems())
        try:
            self._capture.check_privileges(sessions=False)
        except MoveRefused as exc:
            problems += exc.problems
        if problems:
            raise ImportRefused(problems)

    def _problems(self) -> Iterator[str]:
        for table in self._tables.values():
            for field in (*table.pk_fields, table.anchor_field):
                plain = target_field(field)
                if not isinstance(plain, _RECORDABLE) or hasattr(plain, "from_db_value"):
                    yield (
                        f"the changes of {table.label} cannot be followed: a trigger cannot record"
                        f" {field.name!r}, a {type(plain).__name__}. Import without --follow"
                    )
        for name in self._capture.tables_with_silent_changes(list(self._captured())):
            yield (
                f"the changes of the table {name!r} on {self._source!r} cannot be followed: a foreign"
                " key changes or deletes its rows by itself (ON DELETE or ON UPDATE), for which MySQL"
                " and MariaDB call no trigger. Make the foreign key anew without it"
            )

    def install(self) -> None:
        """Create the journal of changes, its triggers, and the fence that can refuse writes. Can be
        repeated.

        Each change of the tables that is committed after this call is in the journal.

        :raises django.db.OperationalError: a transaction on one of the tables took longer than 30
            seconds.
        """
        with self._capture.exclusively(TRIGGER_PATIENCE):
            self._capture.prepare()
            self._capture.watch(self._number, self._group)
            self._capture.install(list(self._captured()), TRIGGER_PATIENCE)

    def is_installed(self) -> bool:
        """Return whether the journal of changes, the fence and all triggers exist."""
        if not self._capture.is_prepared() or self._number not in self._capture.fences():
            return False
        names = {trigger_name(table, event) for table in self._tables for event in EVENTS}
        return names <= self._capture.triggers()

    def remove(self) -> bool:
        """Remove the fence, so that the imported tables of the group accept writes again.

        The triggers and the journal are removed, too, unless the import of another group from the
        same source needs them.

        :returns: whether the triggers and the journal were removed.
        """
        if not self._capture.is_prepared():
            return True
        self._capture.prepare()  # Create missing tables, because the next calls need them.
        self._capture.unwatch(self._number)
        return self._capture.uninstall(TRIGGER_PATIENCE)

    def close(self, patience: float) -> None:
        """Close the fence, so that the imported tables refuse writes. Wait for open transactions
        first.

        :param patience: seconds to wait for open transactions.
        :raises django.db.OperationalError: a transaction was still open after ``patience`` seconds.
            The tables accept writes as before.
        """
        self._capture.close(self._number, patience)

    def is_closed(self) -> bool:
        """Return whether the imported tables refuse writes, because the fence was closed."""
        return self._capture.is_prepared() and self._capture.fences().get(self._number) == "closed"

    def changes(self, limit: int) -> list[Change]:
        return self._capture.changes(self._number, limit)

    def forget(self, changes: Sequence[Change]) -> None:
        self._capture.forget(changes)

    def table_of(self, change: Change) -> SourceTable | None:
        """Return the imported table to which a change in the journal belongs.

        None if the rows of the changed table are not imported.
        """
        return self._tables.get(change.table)

    def row_of(self, table: SourceTable, change: Change) -> tuple[Any, Any]:
        """Return the primary key of the changed row, and its anchor before the change.

        The anchor (:attr:`SourceTable.anchor_field`) is the row's shard key, or the foreign key to
        the parent row that has the shard key. A change of the anchor can mean that the row belongs
        to another shard now. The anchor before the change then shows on which shard the imported
        copy of the row still is.
        """
        size = len(table.pk_fields)
        values: list[Any] = [
            _parsed(field, text)
            for field, text in zip(table.pk_fields, change.pk[:size], strict=True)
        ]
        # MySQL leaves out NULL.
        text = change.pk[size] if len(change.pk) > size else ""
        anchor = table.anchor_field
        return values[0] if size == 1 else tuple(values), anchor.get_prep_value(
            _parsed(anchor, text)
        )

    def _captured(self) -> Iterator[CapturedTable]:
        for name, table in self._tables.items():
            anchor = str(table.anchor_field.column)
            columns = (*(str(field.column) for field in table.pk_fields), anchor)
            yield CapturedTable(name, columns, anchor, fence=self._group)


def _open_capture(alias: str) -> ChangeCapture:
    connection: Any = connections[alias]
    if hasattr(connection, "change_capture"):
        capture: ChangeCapture = connection.change_capture()
        return capture
    path = _CAPTURES.get(connection.vendor)
    if path is None:
        raise ImportRefused(
            [
                f"the changes of {alias!r} cannot be followed: its backend is"
                f" {connection.vendor!r}, and triggers are made on MariaDB, MySQL, PostgreSQL and SQLite"
                " only. Import without --follow"
            ]
        )
    opened: ChangeCapture = import_string(path)(connection.copy())
    return opened


def _parsed(field: Field[Any, Any], text: str) -> Any:
    """Convert the ``text`` that a trigger has recorded to a value of ``field``. Return None if no
    value of the field has this text; for example, "" is no integer.
    """
    try:
        return target_field(field).to_python(text)
    except ValidationError:
        return None
