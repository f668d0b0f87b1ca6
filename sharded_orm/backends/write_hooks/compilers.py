"""Hooks in the SQL compilers, by which this package notices every statement of the ORM.

Django gets the compiler of every statement from ``connection.ops.compiler()``. This includes the
statements of ``save()``, ``bulk_create()``, ``update()`` and ``delete()`` with all its cascades, and
the statements of related managers, the admin, fixtures and migrations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

from django.db.models.sql.compiler import (
    SQLCompiler,
    SQLDeleteCompiler,
    SQLInsertCompiler,
    SQLUpdateCompiler,
)
from django.db.models.sql.constants import ROW_COUNT
from django.db.models.sql.subqueries import InsertQuery

from sharded_orm.backends import key_guard
from sharded_orm.backends.write_hooks import observer
from sharded_orm.backends.write_hooks.compiled_update import check_write
from sharded_orm.backends.write_hooks.followers import (
    StatementFollower,
    WriteFollower,
    followers_of,
)


class ReadMixin(SQLCompiler):
    """The mixin for all compilers, because any statement may contain a SELECT.

    Before a statement is sent to a shard, it checks the text columns of the shard keys of all
    tables that the statement reads. The router takes ``a`` and ``A`` for two keys. So the database
    must not take them for equal.
    """

    def get_from_clause(self) -> Any:
        # Overrides SQLCompiler.get_from_clause. Django now knows all joins, including those of
        # select_related and order_by, so the list of tables is complete here.
        clause = super().get_from_clause()
        connection: Any = self.connection
        if (shard := getattr(connection, "shard", None)) is not None:
            tables = [table.table_name for table in self.query.alias_map.values()]
            if (tables_read := getattr(connection, "tables_read", None)) is not None:
                tables_read.update(tables)
            else:
                key_guard.check(connection, (shard,), tables)
        return clause


class WriteMixin(ReadMixin):
    """The mixin for the compilers of INSERT, UPDATE and DELETE.

    It reports each write to the cache, to the followers of the model (objects of other parts of the
    library that are called for each write), and to the connection. In autocommit, it opens a
    transaction for a write to a cached or followed model. But if the model is not cached and has
    only one follower, this follower decides whether a transaction is needed.
    """

    #: True while execute_returning_sql() runs. It reports the statement, and Django may then call
    #: execute_sql() to send the same statement. So execute_sql() does not report it again.
    _is_reported = False

    def execute_sql(self, *args: Any, **kwargs: Any) -> Any:
        # Overrides execute_sql() of SQLCompiler, SQLInsertCompiler and SQLUpdateCompiler. Each has
        # other arguments, so pass all of them on.
        execute = partial(super().execute_sql, *args, **kwargs)
        if self._is_reported:
            return execute()
        return self._report(execute, counted=ROW_COUNT in args or ROW_COUNT in kwargs.values())

    def execute_returning_sql(self, returning_fields: Any) -> list[Any]:
        # Overrides SQLUpdateCompiler.execute_returning_sql (Django 6.0), which save() uses to
        # update a row. If the database has no UPDATE … RETURNING, Django's method calls
        # execute_sql().
        rows: list[Any] = []

        def execute() -> int:
            rows[:] = super(WriteMixin, self).execute_returning_sql(returning_fields)  # type: ignore[misc]  # of SQLUpdateCompiler
            return len(rows)

        self._is_reported = True
        try:
            self._report(execute, counted=True)
        finally:
            self._is_reported = False
        return rows

    def _report(self, execute: Callable[[], Any], *, counted: bool) -> Any:
        """Report the write to the cache and to the followers, send its statement, and return the
        result.

        :param execute: function that compiles and sends the statement.
        :param counted: whether the result of ``execute`` is the number of rows that the statement
            matched.
        """
        connection: Any = self.connection
        shard = getattr(connection, "shard", None)
        check_write(connection, self.query.get_meta().db_table)
        if shard is not None and isinstance(self.query, InsertQuery):
            key_guard.check_rows(shard, self.query)
        cached_model = observer.cached_model_of(self.query.model)
        run = execute
        followers = [
            follower
            for follower in followers_of(self.query.model, on_shard=shard is not None)
            if follower.concerns(self.query)
        ]
        for follower in followers:
            run = partial(follower.write, self, run)
        if cached_model is not None:
            run = partial(observer.write, cached_model, self, run, counted)
        try:
            if run is execute or not connection.get_autocommit():
                return run()
            with self._session(followers if cached_model is None else ()):
                return run()
        finally:
            if not connection.autocommit:
                connection.wrote = True

    def _session(self, followers: Sequence[WriteFollower]) -> AbstractContextManager[None]:
        """Return a context manager in which to send the statement in autocommit. It opens a
        transaction.

        But if the only follower of the model needs no transaction, the context manager only leases
        a session.
        """
        connection: Any = self.connection
        session: AbstractContextManager[None] | None = None
        if len(followers) == 1 and isinstance(followers[0], StatementFollower):
            session = None if followers[0].needs_transaction(self) else connection.known_session()
        if session is not None:
            return session
        transaction: AbstractContextManager[None] = connection.write_transaction()
        return transaction


@cache
def with_hooks(compiler: type) -> type[SQLCompiler]:
    """Return a subclass of ``compiler``, a compiler class of Django, with the hooks of this module."""
    writes = issubclass(compiler, SQLInsertCompiler | SQLUpdateCompiler | SQLDeleteCompiler)
    return type(compiler.__name__, (WriteMixin if writes else ReadMixin, compiler), {})
