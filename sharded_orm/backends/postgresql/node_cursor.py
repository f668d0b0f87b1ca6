"""Cursors of a node, with which one query reads many shards of the node at once.

The cursors belong to no shard, so their statements name the schema of each table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from sharded_orm.backends.postgresql.connection import PostgreSQLConnection
from sharded_orm.backends.postgresql.cursor import PostgreSQLCursor, SessionLeaseMixin
from sharded_orm.backends.postgresql.node import PostgreSQLPool
from sharded_orm.backends.postgresql.search_path import EXTENSIONS, packet_of
from sharded_orm.backends.postgresql.server_cursor import PostgreSQLServerCursor
from sharded_orm.backends.postgresql.sql_quotes import literal, quoted
from sharded_orm.backends.postgresql.statement_kind import PostgreSQLKind
from sharded_orm.backends.server_connection import session_state_refusal

# The settings for each statement of a node's cursor.
#
# The search path has the schema of extensions, but no shard's schema. Extensions define operators
# there. For example, without those of the type citext, values of citext would be compared like
# ordinary text.
#
# jit = off keeps the server from compiling the query. In a test with hundreds of tables, compiling
# took 48 s, and reading the tables 0.13 s.
_PATH = (
    f"SELECT pg_catalog.set_config('search_path', {literal(quoted(EXTENSIONS))}, true),"
    " pg_catalog.set_config('jit', 'off', true)"
).encode()


# Matches a table with its schema, such as "photos_00042"."photo". It also matches a column with its
# table, but that is rare in these queries.
_TABLE = re.compile(r'"([^"]+)"\."?(\w+)')


@lru_cache(maxsize=8)
def _tables_in(text: str) -> frozenset[tuple[str, str]]:
    """Return the tables that a statement names, as pairs (schema, table). The last few results are
    cached.
    """
    return frozenset(_TABLE.findall(text))


class _QualifiedNamesMixin(SessionLeaseMixin):
    """Base class of a node's cursors. Their statements must name the schema of each table.

    :param node: name of the node in the topology, the map of shards to nodes. None if the server is
        named only in ``DATABASES``.
    """

    def __init__(self, pool: PostgreSQLPool, node: str | None, **options: Any) -> None:
        self.node = node
        name = repr(node or pool.name)
        connection = PostgreSQLConnection(
            pool, None, name, None, PostgreSQLCursor, PostgreSQLServerCursor
        )
        connection.set_path, connection.autocommit_prefix = _PATH, [_PATH]
        connection.autocommit_packet = packet_of([_PATH])
        super().__init__(connection, **options)

    def use_schemas(self, schemas: Iterable[str]) -> None:
        """Record that the next statements use tables of ``schemas``, although their text does not
        name the tables. The pool closes a session that has used many tables.
        """
        self._owner.schemas = frozenset(schemas)

    def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
        text = self._text(query)
        connection = self._owner
        connection.tables = _tables_in(text)
        if connection.session is not None:
            connection.session.tables |= connection.tables
        return super().execute(query, params, **options)

    def _run_special(
        self, connection: PostgreSQLConnection, kind: PostgreSQLKind, text: str, *more: Any
    ) -> None:
        raise session_state_refusal(text)

    def close(self) -> None:
        super().close()
        connection = self._owner
        if not connection.autocommitted and not connection.closed:
            connection.rollback()
        connection.close()


class PostgreSQLNodeCursor(_QualifiedNamesMixin, PostgreSQLCursor):
    """A node's cursor that fetches all rows at once, in ``execute``."""


class PostgreSQLNodeStream(_QualifiedNamesMixin, PostgreSQLServerCursor):
    """A node's cursor that leaves the rows on the server until ``fetchmany`` fetches them, so that
    a large result needs little memory.
    """

    def __init__(self, pool: PostgreSQLPool, node: str | None) -> None:
        super().__init__(pool, node, name="sharded_orm_stream", scrollable=False, withhold=False)
        # Use a transaction, which stays open until all rows are fetched. At its end, the server
        # drops rows that are still unread.
        self._owner.autocommit = False
