"""Errors of the global database, where the journal of operations is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from django.db import (
    DEFAULT_DB_ALIAS,
    Error,
    InternalError,
    OperationalError,
    ProgrammingError,
    connections,
)

from sharded_orm import runtime
from sharded_orm.exceptions import OperationHeld
from sharded_orm.models.tables.journal import OperationScript
from sharded_orm.operations.exceptions import JournalMissing

# Maps the error code of a server that is read only to what makes it take writes again. The code is
# a number on MariaDB and MySQL, and an SQLSTATE on PostgreSQL.
_READ_ONLY: Final[Mapping[Any, str]] = {
    1290: "SET GLOBAL read_only = OFF",
    "25006": "pg_promote() if it is a standby, else default_transaction_read_only = off",
}


def nodes_beside() -> list[str]:
    """Return the names of nodes that are on the same server as the global database.

    Compares the addresses (HOST and PORT) in the settings. Sends no query.
    """
    address = _address(connections[DEFAULT_DB_ALIAS].settings_dict)
    if not any(address):
        return []
    nodes = runtime.topology().nodes
    return sorted(name for name, settings in nodes.items() if _address(settings) == address)


def explain(error: Error) -> None:
    """Add a note for the operator to ``error``, an error of the global database.

    The note names the database and its server, and says what to do.
    """
    place = f"{DEFAULT_DB_ALIAS!r}, {database_place(DEFAULT_DB_ALIAS)}"
    nodes = nodes_beside()
    server = f"the server of node {' and '.join(map(repr, nodes))}" if nodes else "its server"
    cause = error.__cause__
    codes = (*error.args[:1], getattr(cause, "sqlstate", None))
    remedies = [_READ_ONLY[code] for code in codes if code in _READ_ONLY]
    if remedies:
        closed = ", as each side of a pair is after a restart" if nodes else ""
        error.add_note(
            f"The global database ({place}), which has the journal of operations, refuses writes: {server} is"
            f" read only{closed}. Open it by hand ({remedies[0]}), and run the command again at once."
        )
    else:
        error.add_note(
            f"This is the error of the global database ({place}), which has the journal of operations. See"
            f" that {server} runs and takes writes, and run the command again."
        )


@contextmanager
def require_journal() -> Iterator[None]:
    """A context manager that detects missing journal tables if its block raises a database error.

    :raises JournalMissing: the block failed because the journal's tables do not exist.
    """
    try:
        yield
    except OperationHeld:
        raise  # This is no error of the database.
    except (InternalError, OperationalError, ProgrammingError) as exc:
        try:
            tables = connections[DEFAULT_DB_ALIAS].introspection.table_names()
        except Error:
            # It is not known whether the tables exist. Behave as if they did, so that the caller
            # receives the error of the block and not this one.
            tables = [OperationScript._meta.db_table]
        if OperationScript._meta.db_table in tables:
            explain(exc)
            raise
        raise JournalMissing(
            f"The global database ({DEFAULT_DB_ALIAS!r}) has no journal of operations yet. Make it"
            " with 'manage.py migrate sharded_orm'."
        ) from exc


def database_place(alias: str) -> str:
    """Return the server or the file of a database, as messages name it: ``server '10.0.0.1:3306'``."""
    settings = connections[alias].settings_dict
    address = ":".join(filter(None, _address(settings)))
    return f"server {address!r}" if address else f"file {str(settings['NAME'])!r}"


def _address(settings: Mapping[str, Any]) -> tuple[str, str]:
    return str(settings.get("HOST") or ""), str(settings.get("PORT") or "")
