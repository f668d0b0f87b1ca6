"""Cursors of a node rather than of a shard. Their statements name the schema of each table.

Queries that read many shards of a node at once use these cursors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from sharded_orm.backends.postgresql.connection import PostgreSQLConnection
from sharded_orm.backends.postgresql.cursor import PostgreSQLCursor, SessionLeaseMixin
from sharded_orm.backends.postgresql.node import PostgreSQLPool
from sharded_orm.backends.postgresql.search_path import EXTENSIONS, packet_of
from sharded_orm.backends.postgresql.server_cursor import PostgreSQLServerCursor
from sharded_orm.backends.postgresql.sql_quotes import literal, quoted
from sharded_orm.backends.postgresql.statement_kind import PostgreSQLKind
from sharded_orm.exceptions import SessionStateRefused

# The search path of a shard without the shard's schema. Operators and functions of extensions are
# found: without those of citext, for one, its texts would be compared as other texts.
# The server does not compile expressions to machine code. For hundreds of tables, that would take longer
# than to read them: 48 s instead of 0.13 s in a test.
_PATH = (
    f"SELECT pg_catalog.set_config('search_path', {literal(quoted(EXTENSIONS))}, true),"
    " pg_catalog.set_config('jit', 'off', true)"
).encode()


# The name of a table with its schema. Names of columns match, too, but these are few.
_TABLE = re.compile(r'"([^"]+)"\."?(\w+)')


class _QualifiedNamesMixin(SessionLeaseMixin):
    """Base class of a node's cursors. The search path has extensions only, so the name of a table
    without a schema is an error.

    :param node: name of the node in the topology; None if the settings name the server otherwise.
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
        """Tell that the next statements use the tables of ``schemas`` without naming them."""
        self._owner.schemas = frozenset(schemas)

    def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
        text = self._text(query)
        connection = self._owner
        connection.tables = set(_TABLE.findall(text))
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
        # The rows live as long as their transaction.
        self._owner.autocommit = False
