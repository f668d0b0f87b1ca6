"""Sequences of ticket servers, begun by migrations."""

from __future__ import annotations

import re
from typing import Any

from django.db import NotSupportedError
from django.db.migrations.operations.base import Operation, OperationCategory

from sharded_orm import runtime
from sharded_orm.operations.tickets import begin, create
from sharded_orm.operations.tickets.creation import is_test_database


class CreateSequence(Operation):
    """Begin a sequence on each ticket server when that alias is migrated (F4).

    ``migrate --database tickets_1`` begins it there, and so on; other databases are left
    alone. It begins as ``manage.py tickets create`` begins it: above every id that exists,
    and above what the other servers have handed out, which must answer. A sequence that
    is there stays as it is.

    Backwards it does nothing: ids that were handed out are never taken back.

    :param start: the first id may be this one.
    :param form: ``update``, ``replace`` or ``sequence``; by default the server's own.
    """

    # What migrations name, wherever this module is.
    __module__ = "sharded_orm.migrations.operations"

    reversible = True
    reduces_to_sql = False
    category = OperationCategory.ADDITION

    def __init__(self, name: str, start: int | None = None, form: str | None = None) -> None:
        self.name = name
        self.start = start
        self.form = form

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        given = {"name": self.name, "start": self.start, "form": self.form}
        return type(self).__name__, [], {k: v for k, v in given.items() if v is not None}

    def state_forwards(self, app_label: str, state: Any) -> None:
        """No model changes."""

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        connection = schema_editor.connection
        for server in runtime.tickets().servers:
            if server.alias != connection.alias:
                continue
            _refuse_locked_file(connection)
            if is_test_database(server.alias):
                # The other databases of the run are not made yet, and there are no rows.
                begin(server, [self.name], after=(self.start or 1) - 1, form=self.form)
            else:
                create([self.name], start=self.start, form=self.form, only=server.alias)

    def database_backwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        """Nothing: rows may have the ids that were handed out."""

    def describe(self) -> str:
        return f"Begin ticket sequence {self.name}"

    @property
    def migration_name_fragment(self) -> str:
        return "sequence_" + re.sub(r"\W+", "_", self.name).lower()


def _refuse_locked_file(connection: Any) -> None:
    """The sequence is made on another connection, which a transaction may lock out."""
    mode = getattr(connection, "transaction_mode", None)  # of SQLite's connections only
    if mode in (None, "DEFERRED"):
        return
    if connection.in_atomic_block:
        raise NotSupportedError(
            f"CreateSequence cannot run in the transaction of a migration on {connection.alias!r},"
            f" which locks the file (transaction_mode {mode!r}): set atomic = False on the Migration."
        )
