"""Compiles the SQL of a scatter once for many shards.

The SQL is compiled with a copy of one shard's connection object (:class:`Facade`). It has
placeholders where the shards differ, such as the name of the schema. Mixins for Django's compilers
write the placeholder for the schema, and refuse SQL that is not possible on many shards.
"""

from __future__ import annotations

import copy
import secrets
from typing import TYPE_CHECKING, Any

from django.db.models.expressions import Func, RawSQL, Window
from django.db.models.sql.compiler import SQLCompiler
from django.db.models.sql.datastructures import BaseTable, Join
from django.db.models.sql.where import ExtraWhere

from sharded_orm import compat
from sharded_orm.scatter.hidden_rows import HiddenRows, VisibleRows
from sharded_orm.scatter.refusals import has_window_text, refuse

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models.sql.query import Query

# Marks in the compiled SQL. They stand for the shard's schema, for the keys of the rows to read,
# and for the shard's index in the plan. Each mark contains a random number, so no name or literal
# of a query is equal to a mark.
_NONCE = secrets.token_hex(8)
SCHEMA_MARK = f"`{_NONCE}schema`"
PK_MARK = f"`{_NONCE}pk`"
SHARD_MARK = f"`{_NONCE}shard`"


class Facade:
    """Holds :attr:`connection`, a copy of a shard's connection object that only compiles a query.

    The ``ops`` of the copy return this package's compilers. The copy is shallow, never connects,
    and does not affect other queries of the thread.

    :param wrapper: the connection object of one of the shards.
    :param qualify: whether to put a placeholder for the schema before each table's name.
    :param hidden: the rows that the query must not read; None to read all rows.
    """

    def __init__(
        self, wrapper: BaseDatabaseWrapper, *, qualify: bool, hidden: HiddenRows | None = None
    ) -> None:
        # The copy below never connects, so it cannot read MySQL's server data, such as the version.
        # Let ``wrapper`` read the data now, so that the copy has it.
        getattr(wrapper, "mysql_server_data", None)
        self.connection = copy.copy(wrapper)
        # The copy of the connection object must neither use the driver's connection nor keep it
        # open.
        self.connection.connection = None
        self.connection.ops = copy.copy(wrapper.ops)
        # Tell the compilers that the SQL is for many shards, and not only for the shard of
        # ``wrapper``.
        self.connection.stands_for_many = True  # type: ignore[attr-defined]  # this package's compilers read it
        #: Names of the tables that the query reads; complete only after the query is compiled.
        self.tables: set[str] = set()
        self.connection.tables_read = self.tables  # type: ignore[attr-defined]  # this package's compilers read it
        self._ops = wrapper.ops
        self._mixins: tuple[type, ...] = (Qualified, CheckedSQL) if qualify else (CheckedSQL,)
        # The compilers and expressions of this package put this text before each table's name.
        self.connection.table_prefix = f"{SCHEMA_MARK}." if qualify else ""  # type: ignore[attr-defined]  # this package's compilers read it
        if hidden is not None:
            self._mixins = (VisibleRows, *self._mixins)
            self.connection.hidden_rows = hidden  # type: ignore[attr-defined]  # this package's compilers read it
            # If rows of a table are hidden, the query reads a derived table instead. A derived
            # table has no primary key. So GROUP BY must list all selected columns; the primary key
            # alone is not enough.
            self.connection.features = copy.copy(wrapper.features)
            self.connection.features.allows_group_by_selected_pks = False
        self.connection.ops.compiler = self.compiler  # type: ignore[method-assign]  # replaced only for this query

    def compiler(self, compiler_name: str) -> type[SQLCompiler]:
        base = self._ops.compiler(compiler_name)
        return _subclass(self._mixins, base)

    def root(self, mixin: type, query: Query) -> Any:
        """Return a compiler for ``query``, which must be the outermost query.

        For its subqueries, Django calls :meth:`compiler`.

        :param mixin: the first base class of the compiler's class.
        """
        base = self._ops.compiler("SQLCompiler")
        return _subclass((mixin, *self._mixins), base)(query, self.connection, None)


_subclasses: dict[tuple[type, ...], type] = {}


def _subclass(mixins: tuple[type, ...], base: type) -> type:
    key = (*mixins, base)
    subclass = _subclasses.get(key)
    if subclass is None:
        subclass = _subclasses[key] = type(f"Scatter{base.__name__}", key, {})
    return subclass


class CheckedSQL(SQLCompiler):
    """A compiler mixin that refuses raw SQL and window functions.

    Raw SQL could read another shard's tables. The result of a window function depends on the rows
    of all shards.
    """

    def compile(self, node: Any) -> Any:
        if isinstance(node, RawSQL | ExtraWhere):
            raise refuse(
                "raw SQL in the query (RawSQL, extra())",
                "write it with expressions, or ask one shard",
            )
        if isinstance(node, Window) or (isinstance(node, Func) and has_window_text(node)):
            raise refuse("a window function", "compute it in Python, or ask one shard")
        return super().compile(node)


class Qualified(SQLCompiler):
    """A compiler mixin that puts a placeholder for the schema before the name of every table."""

    def compile(self, node: Any) -> Any:
        sql, params = super().compile(node)
        if isinstance(node, BaseTable):
            return f"{SCHEMA_MARK}.{sql}", params
        if isinstance(node, Join):
            quoted = compat.quote_name(self, node.table_name)
            before = f"{node.join_type} {quoted}"
            if not sql.startswith(before):
                raise refuse(f"the join {sql!r}", "ask one shard")
            return f"{node.join_type} {SCHEMA_MARK}.{quoted}{sql[len(before) :]}", params
        return sql, params
