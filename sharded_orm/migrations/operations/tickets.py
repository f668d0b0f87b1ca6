"""Creating sequences of ticket servers in migrations."""

from __future__ import annotations

import re
from typing import Any

from django.db import NotSupportedError
from django.db.migrations.operations.base import Operation, OperationCategory

from sharded_orm import runtime
from sharded_orm.operations.tickets import begin, create
from sharded_orm.operations.tickets.creation import is_test_database


class CreateSequence(Operation):
    """Create a sequence on each ticket server when that alias is migrated (F4).

    ``migrate --database tickets_1`` creates it there, and so on; other databases are left alone.
    Like ``manage.py tickets create``, the operation begins the sequence above every existing id and
    above every id that the other servers have handed out; so these must answer. An existing
    sequence stays as it is.

    Backwards, the operation does nothing: ids that were handed out are never taken back.

    :param start: the smallest possible first id.
    :param form: ``update``, ``replace`` or ``sequence``; by default the server's own.
    """

    # The path that migrations import, wherever this module is.
    __module__ = "sharded_orm.migrations.operations"

    reversible = True
    reduces_to_sql = False
    category = OperationCategory.ADDITION

    def __init__(self, name: str, start: int | None = None, form: str | None = None) -> None:
        self.name = name
        self.start = start
        self.form = form

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        arguments = {"name": self.name, "start": self.start, "form": self.form}
        return type(self).__name__, [], {k: v for k, v in arguments.items() if v is not None}

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
                # A test run has not created its other databases yet, and there are no rows.
                begin(server, [self.name], after=(self.start or 1) - 1, form=self.form)
            else:
                create([self.name], start=self.start, form=self.form, only=server.alias)

    def database_backwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        """Do nothing: rows may have the ids that were handed out."""

    def describe(self) -> str:
        return f"Begin ticket sequence {self.name}"

    @property
    def migration_name_fragment(self) -> str:
        return "sequence_" + re.sub(r"\W+", "_", self.name).lower()


def _refuse_locked_file(connection: Any) -> None:
    """:raises NotSupportedError: the transaction locks out the sequence's own connection."""
    mode = getattr(connection, "transaction_mode", None)  # of SQLite's connections only
    if mode in (None, "DEFERRED"):
        return
    if connection.in_atomic_block:
        raise NotSupportedError(
            f"CreateSequence cannot run in the transaction of a migration on {connection.alias!r},"
            f" which locks the file (transaction_mode {mode!r}): set atomic = False on the Migration."
        )
