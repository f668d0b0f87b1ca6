"""A separate session with one shard, for work that must not be in the application's transaction."""

from __future__ import annotations

from typing import Any, Self

from sharded_orm.backends.shard_errors import SessionErrorWrapper


class OwnSession:
    """A separate session with one shard, in autocommit. For one thread only.

    As a context manager, it closes the session at the end of the block.

    :param connection: a connection object of Django's own backend that nothing else uses.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        if getattr(connection, "shard", None) is None:
            connection.wrap_database_errors = SessionErrorWrapper(connection)
        self._quote = connection.ops.quote_name

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._connection.close()

    def _rows(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        with self._connection.cursor() as cursor:
            cursor.execute(sql, params or None)
            return list(cursor.fetchall()) if cursor.description else []
