"""A migration operation that creates a sequence of ids on the ticket servers."""

from __future__ import annotations

import re
from typing import Any

from django.db import NotSupportedError
from django.db.migrations.operations.base import Operation, OperationCategory

from sharded_orm import runtime
from sharded_orm.operations.tickets import begin, create
from sharded_orm.operations.tickets.creation import is_test_database


class CreateSequence(Operation):
    """A migration operation that creates a sequence of ids on a ticket server (Flickr, F4).

    ``migrate --database tickets_1`` creates the sequence on the ticket server ``tickets_1``. On any
    other database, the operation does nothing. An existing sequence stays as it is.

    The first id is above every existing id, and above every id that another server has handed out.
    To find it, the operation queries all ticket servers. So all of them must answer, as for
    ``manage.py tickets create``.

    Backwards, the operation does nothing: ids that were handed out are never taken back.

    :param name: the sequence's name.
    :param start: the smallest possible first id; by default the first id is above all existing
        ones.
    :param form: the kind of SQL statement that makes the next id: ``update``, ``replace`` or
        ``sequence``. By default, the form of the sequence on the other servers; if they do not have
        it, the first form that the database supports.
    """

    # makemigrations writes this import path into migrations. It is the path of the package, so the
    # migrations stay valid if the class moves to another module of the package.
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
        """Do nothing, because the operation changes no model."""

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        connection = schema_editor.connection
        for server in runtime.tickets().servers:
            if server.alias != connection.alias:
                continue
            _refuse_locked_file(connection)
            if is_test_database(server.alias):
                # In a test database, do not call create(). It looks for existing ids in other
                # databases, which the test run may not have created yet. They would contain no ids
                # anyway.
                begin(server, [self.name], after=(self.start or 1) - 1, form=self.form)
            else:
                create([self.name], start=self.start, form=self.form, only=server.alias)

    def database_backwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        """Do nothing. The sequence stays, because rows may have ids from it."""

    def describe(self) -> str:
        return f"Begin ticket sequence {self.name}"

    @property
    def migration_name_fragment(self) -> str:
        return "sequence_" + re.sub(r"\W+", "_", self.name).lower()


def _refuse_locked_file(connection: Any) -> None:
    """Refuse a migration whose transaction locks the SQLite file of the ticket server.

    The sequence is created on another connection, which would wait for the end of the transaction.

    :raises NotSupportedError: ``connection``, that of the migration, is in such a transaction.
    """
    # Only connections to SQLite have the attribute transaction_mode.
    mode = getattr(connection, "transaction_mode", None)
    if mode in (None, "DEFERRED"):
        return
    if connection.in_atomic_block:
        raise NotSupportedError(
            f"CreateSequence cannot run in the transaction of a migration on {connection.alias!r},"
            f" which locks the file (transaction_mode {mode!r}): set atomic = False on the Migration."
        )
