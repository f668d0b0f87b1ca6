"""Send UPDATEs whose SQL was compiled earlier, without the cost of Django's compiler.

The functions make the same checks as a compiler of this package. But they do not tell the cache, or
other followers of a model, about the writes. So they may be used only for rows that are not cached
and not followed.
"""

from __future__ import annotations

from typing import Any

from sharded_orm.backends import key_guard
from sharded_orm.backends.write_hooks import observer
from sharded_orm.backends.write_hooks.followers import is_followed
from sharded_orm.backends.write_hooks.route_check import check_route


def is_observed(connection: Any, model: Any) -> bool:
    """Whether writes to ``model`` must be reported.

    True if its rows are cached, or if another part of the library follows its writes.
    """
    on_shard = getattr(connection, "shard", None) is not None
    return observer.cached_model_of(model) is not None or is_followed(model, on_shard=on_shard)


def check_write(connection: Any, table: str) -> None:
    """Check the shard keys of a write, before its statement is compiled and sent.

    :param table: the table to which the statement writes.
    :raises InexactShardKey: the column of the shard key has a collation by which the database takes
        two different keys for equal.
    :raises KeyMoved: a key of the write has moved to another shard. Raised here only on SQLite. On
        other databases, it is raised later, when the statement is sent.
    """
    shard = getattr(connection, "shard", None)
    if shard is None:
        return
    # Check text keys first. If the model is cached, the cache may send queries of its own before
    # the statement is sent.
    key_guard.check(connection, (shard,), (table,))
    if connection.features.shards_are_files:
        # Check here that the keys are still on this shard. The other backends make this check when
        # they lease a session, which SQLite does not do.
        check_route()


def send(connection: Any, sql: str, parameters: tuple[Any, ...]) -> int:
    """Send an UPDATE of rows that are not cached and not followed. Return how many rows its
    condition matched.
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
