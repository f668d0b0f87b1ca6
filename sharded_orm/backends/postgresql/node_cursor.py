"""Cursors of a node, which read many shards of the node at once.

Their statements name the schema of each table, because the cursors belong to no shard.
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
from sharded_orm.exceptions import SessionStateRefused

# The search path of a node's cursor. It has the schema of extensions, but not the schema of any
# shard. Without the operators of citext, for example, values of citext would be compared as
# ordinary texts. "jit" off keeps the server from compiling expressions to machine code. In a test
# with hundreds of tables, compiling took 48 s, and reading the tables 0.13 s.
_PATH = (
    f"SELECT pg_catalog.set_config('search_path', {literal(quoted(EXTENSIONS))}, true),"
    " pg_catalog.set_config('jit', 'off', true)"
).encode()


# Matches the name of a table with its schema. The pattern also matches the name of a column with
# its table, but such names are rare.
_TABLE = re.compile(r'"([^"]+)"\."?(\w+)')


@lru_cache(maxsize=8)
def _tables_in(text: str) -> frozenset[tuple[str, str]]:
    """Return the pairs of schema and table that a statement names. The last few results are cached."""
    return frozenset(_TABLE.findall(text))


class _QualifiedNamesMixin(SessionLeaseMixin):
    """Base class of a node's cursors. Statements must name the schema of each table.

    :param node: name of the node in the topology, the map of shards to nodes; None if ``DATABASES``
        names the server.
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
        """Record that the next statements use the tables of ``schemas`` without naming the schemas."""
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
        raise SessionStateRefused(f"A node's cursor takes plain statements only, not {text!r}.")

    def close(self) -> None:
        super().close()
        connection = self._owner
        if not connection.autocommitted and not connection.closed:
            connection.rollback()
        connection.close()


class PostgreSQLNodeCursor(_QualifiedNamesMixin, PostgreSQLCursor):
    """A node's cursor whose ``execute`` fetches all rows."""


class PostgreSQLNodeStream(_QualifiedNamesMixin, PostgreSQLServerCursor):
    """A node's cursor that leaves rows on the server until ``fetchmany`` fetches them."""

    def __init__(self, pool: PostgreSQLPool, node: str | None) -> None:
        super().__init__(pool, node, name="sharded_orm_stream", scrollable=False, withhold=False)
        # Open a transaction, and keep it open until all rows are fetched: at its end, the server
        # drops the unread rows.
        self._owner.autocommit = False
