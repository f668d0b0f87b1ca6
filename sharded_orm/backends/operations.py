"""First base class of each backend's ``DatabaseOperations``.

It adds methods that this package needs, and reports to the cache when Django's flush empties tables.
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
    #: Whether an INSERT fails if it generates an id outside of the range ``returned_ids``. The
    #: field of the id may have this range as an attribute.
    checks_returned_ids: ClassVar[bool] = False

    @staticmethod
    def refused_id(error: DatabaseError) -> int | None:
        """Return the generated id that made an INSERT fail (see :attr:`checks_returned_ids`); None if
        ``error`` is any other error.
        """
        return None

    def compiler(self, compiler_name: str) -> type[SQLCompiler]:
        stock: Any = super().compiler(compiler_name)
        return with_hooks(stock)

    def show_definition_sql(self, table: str) -> str:
        """Return an SQL statement that an operator can run to see the definition of ``table``."""
        raise NotImplementedError

    def tables_among(self, cursor: Any, tables: Collection[str]) -> list[str]:
        """Return those of ``tables`` that exist in the current schema. One query."""
        present = set(self.connection.introspection.table_names(cursor))
        return [table for table in tables if table in present]

    @staticmethod
    def raise_counters(cursor: Any, firsts: Mapping[str, int]) -> None:
        """Raise each table's counter (AUTO_INCREMENT or the like) to the table's id in ``firsts``.

        A higher counter stays as it is, because a lower value would generate ids of deleted rows again.
        At most two queries per table. The tables must exist.

        :param cursor: a cursor in the schema of the tables.
        :param firsts: the lowest id that each table's counter may generate, keyed by table.
        """
        raise NotImplementedError

    def set_counter_sql(self, table: str, column: str, following: str) -> str:
        """Return an SQL statement with which an operator sets the counter of ``table``.

        :param column: the column whose ids the counter generates.
        :param following: the id that the next row gets.
        """
        raise NotImplementedError

    def execute_sql_flush(self, sql_list: Any) -> None:
        # Report the flush to the cache here, because no compiler does: the DELETE or TRUNCATE
        # statements in sql_list do not come from the ORM.
        with observer.table_flush(self.connection):
            super().execute_sql_flush(sql_list)
