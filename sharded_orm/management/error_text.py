"""The text of an error at the end of a command, which names the database that does not answer."""

from __future__ import annotations

from collections.abc import Iterator

from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, Error, InterfaceError, OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from sharded_orm import runtime
from sharded_orm.backends.shard_errors import noted_alias
from sharded_orm.exceptions import ShardedOrmError
from sharded_orm.operations.runs.global_database import database_place


def error_text(error: Exception) -> str:
    """Return the message of ``error`` and its notes, as a command shows them without a traceback.

    The notes of a database error name the shard. If no connection to its node can be opened now, the
    text has the remedy. A database error without notes may be one of the global database or of the
    directory. If one of these does not answer now, the text names it, its server and the remedy.
    This costs a login to each of them.
    """
    notes: list[str] = list(getattr(error, "__notes__", []))
    if isinstance(error, (OperationalError, InterfaceError)):
        if not notes:
            notes += _unreachable_databases()
        elif (
            (alias := noted_alias(error))
            and alias in connections.settings  # The topology may have changed since.
            and not _answers(alias)
        ):
            notes.append(
                "No connection to the node can be opened now. See that its server runs and takes this account,"
                " or correct the entry in NODES; then run the command again."
            )
    if not notes:
        return str(error)
    return " ".join([f"{str(error).rstrip('.')}.", *notes])


def _unreachable_databases() -> Iterator[str]:
    roles: dict[str, list[str]] = {DEFAULT_DB_ALIAS: ["the global database"]}
    try:
        roles.setdefault(runtime.config().directory, []).append("the directory")
    except (ShardedOrmError, ImproperlyConfigured):
        pass  # Without a valid setting, nobody knows where the directory is.
    for alias, names in roles.items():
        if not _answers(alias):
            what = " and ".join(names)
            yield (
                f"{what[0].upper()}{what[1:]} ({alias!r}, {database_place(alias)}) cannot be reached. See that it runs and"
                " takes connections, or correct the entry in DATABASES; then run the command again."
            )


def _answers(alias: str) -> bool:
    # Open a new connection, because the thread's connection may be in a transaction that has failed.
    connection = connections.create_connection(alias)
    try:
        connection.ensure_connection()
    except Error:
        return False
    finally:
        # Call the method of the base class: the close() of Django's SQLite backend does not close a
        # database in memory.
        BaseDatabaseWrapper.close(connection)
    return True
