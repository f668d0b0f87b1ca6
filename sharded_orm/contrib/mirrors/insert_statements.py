"""INSERTs of single rows into the tables of mirrors. Their SQL is compiled once.

Each write of a source executes two such INSERTs. Compiling an INSERT takes several times as long as
sending it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import connections, models
from django.db.models.sql import InsertQuery

from sharded_orm.contrib.mirrors.models import OutboxRow, RowVersion
from sharded_orm.database_clock import DatabaseClock


def insert_outbox_row(alias: str, *values: Any) -> Callable[[], int]:
    """Insert a row into the outbox, with the current time. Return a function that returns the row's
    id.

    Call the returned function only after the transaction was committed.

    :param alias: the alias of the shard.
    :param values: the values of ``source``, ``row``, ``key``, ``mirror_keys`` and ``epoch`` of an
        :class:`OutboxRow`.
    """
    connection = connections[alias]
    sql = _sql(connection, OutboxRow)
    with connection.cursor() as cursor:
        # The last two values are ``attempts`` and ``error``. The SQL itself sets ``written_at`` to
        # the time of the server.
        cursor.execute(sql, [*values, 0, ""])
        if cursor.description is not None:
            number = int(cursor.fetchone()[0])
            return lambda: number
        # Return a function instead of the id. If the row is sent in one packet with the COMMIT, the
        # cursor knows the id only after the COMMIT.
        return lambda: int(cursor.cursor.lastrowid)


def insert_version(alias: str, *values: Any) -> None:
    """Insert a :class:`RowVersion`, which stores the version of one row of a mirror.

    :param alias: the alias of the shard.
    :param values: the mirror's label, the primary key of the mirror's row as text, the shard key of the
        source's row as text (or None), and the version.
    :raises django.db.IntegrityError: the shard already stores a version for that row of the mirror.
    """
    connection = connections[alias]
    with connection.cursor() as cursor:
        cursor.execute(_sql(connection, RowVersion), list(values))


_compiled: dict[tuple[type, type[models.Model]], str] = {}


def _sql(connection: Any, model: type[models.Model]) -> str:
    """Return the SQL of an INSERT of one row, compiled by Django once for each class of
    connections.

    All shards with the same database backend share the SQL, because it does not name the schema.
    """
    kind = (type(connection), model)
    sql = _compiled.get(kind)
    if sql is None:
        is_outbox = model is OutboxRow
        values = {"written_at": DatabaseClock()} if is_outbox else {}
        row = model(**values)
        fields = [
            f for f in model._meta.local_concrete_fields if not isinstance(f, models.AutoField)
        ]
        query = InsertQuery(model)
        query.insert_values(fields, [row])
        compiler: Any = query.get_compiler(connection=connection)
        if is_outbox and not connection.features.has_lastrowid:
            compiler.returning_fields = [model._meta.pk]
        ((sql, _),) = compiler.as_sql()
        _compiled[kind] = sql
    return sql
