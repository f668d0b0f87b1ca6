"""Send UPDATEs whose SQL was compiled earlier.

These functions make the same checks as a compiler, but report no writes to the cache or to
followers of a model. So they are only for rows that are not cached and not followed.
"""

from __future__ import annotations

from typing import Any

from sharded_orm.backends import key_guard
from sharded_orm.backends.write_hooks import observer
from sharded_orm.backends.write_hooks.followers import is_followed
from sharded_orm.backends.write_hooks.route_check import check_route


def is_observed(connection: Any, model: Any) -> bool:
    """Whether the rows of ``model`` are cached, or whether another part of the library follows writes
    to them.
    """
    on_shard = getattr(connection, "shard", None) is not None
    return observer.cached_model_of(model) is not None or is_followed(model, on_shard=on_shard)


def check_write(connection: Any, table: str) -> None:
    """Check the shard keys of a write, before its statement is compiled and sent.

    :param table: the table that is written.
    :raises InexactShardKey: the database does not compare the shard keys of the table as exactly as
        the router does.
    :raises KeyMoved: a key of the write has moved to another shard. This is raised here only on
        SQLite. On other databases, it is raised later, when the statement is sent.
    """
    shard = getattr(connection, "shard", None)
    if shard is None:
        return
    # Check the text keys now, because the cache, which is notified of the write, may send queries
    # before it runs the statement.
    key_guard.check(connection, (shard,), (table,))
    if connection.features.shards_are_files:
        # Check here that the keys are still on this shard. The other backends check this when they
        # have leased a session, but an SQLite file has no sessions.
        check_route()


def send(connection: Any, sql: str, parameters: tuple[Any, ...]) -> int:
    """Send an UPDATE of rows that are not cached and not followed. Return the number of rows that
    matched.
    """
    try:
        if getattr(connection, "shard", None) is not None and connection.write_rows is not None:
            changed: int | None = connection.write_rows(sql, parameters)
            if changed is not None:
                return changed
        with connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            return int(cursor.rowcount)
    finally:
        if not connection.autocommit:
            connection.wrote = True
