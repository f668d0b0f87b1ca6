"""The base class that the ``DatabaseOperations`` of all backends have in common. It comes before
Django's class.

It adds methods that this package needs. It also tells the cache when Django's flush empties tables.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from django.db import DatabaseError
from django.db.backends.base.operations import BaseDatabaseOperations
from django.db.models.sql.compiler import SQLCompiler

from sharded_orm.backends.write_hooks import observer
from sharded_orm.backends.write_hooks.compilers import with_hooks


class OperationsMixin(BaseDatabaseOperations):
    #: Whether the server checks the ids that it generates. A field can have the attribute
    #: ``returned_ids``, a range. If the id that was generated for an INSERT is outside of this
    #: range, the INSERT fails.
    checks_returned_ids: ClassVar[bool] = False

    @staticmethod
    def refused_id(error: DatabaseError) -> int | None:
        """Return the id in ``error``, if an INSERT has failed because its generated id was out of
        range (see :attr:`checks_returned_ids`).

        Return None if ``error`` is any other error.
        """
        return None

    def compiler(self, compiler_name: str) -> type[SQLCompiler]:
        stock: Any = super().compiler(compiler_name)
        return with_hooks(stock)

    def show_definition_sql(self, table: str) -> str:
        """Return an SQL statement with which an operator can look at the definition of ``table``."""
        raise NotImplementedError

    def tables_among(self, cursor: Any, tables: Collection[str]) -> list[str]:
        """Return those of ``tables`` that exist in the current schema. One query."""
        present = set(self.connection.introspection.table_names(cursor))
        return [table for table in tables if table in present]

    @staticmethod
    def raise_counters(cursor: Any, firsts: Mapping[str, int]) -> None:
        """Raise the counters of tables (AUTO_INCREMENT or the like), so that the next ids are not
        too low.

        A counter that is already higher stays as it is. With a lower value, it would generate the
        ids of deleted rows again. At most two queries per table. The tables must exist.

        :param cursor: a cursor in the schema of the tables.
        :param firsts: maps the name of each table to the lowest id that its counter may generate.
        """
        raise NotImplementedError

    def set_counter_sql(self, table: str, column: str, following: str) -> str:
        """Return an SQL statement with which an operator can set the counter of ``table``.

        :param column: the column whose ids the counter generates.
        :param following: the id that the next row shall get.
        """
        raise NotImplementedError

    def execute_sql_flush(self, sql_list: Any) -> None:
        # Tell the cache about the flush here. The compilers of the ORM tell it about their
        # statements, but the DELETE or TRUNCATE statements in sql_list do not come from a compiler.
        with observer.table_flush(self.connection):
            super().execute_sql_flush(sql_list)
