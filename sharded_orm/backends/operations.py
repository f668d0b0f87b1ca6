"""First base of each backend's ``DatabaseOperations``: what Django's lacks, and flushes reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db.backends.base.operations import BaseDatabaseOperations
from django.db.models.sql.compiler import SQLCompiler

from sharded_orm.backends.write_hooks import observer
from sharded_orm.backends.write_hooks.compilers import with_hooks


class OperationsMixin(BaseDatabaseOperations):
    def compiler(self, compiler_name: str) -> type[SQLCompiler]:
        stock: Any = super().compiler(compiler_name)
        return with_hooks(stock)

    def show_definition_sql(self, table: str) -> str:
        """A statement that an operator can run to see the definition of a table."""
        raise NotImplementedError

    @staticmethod
    def raise_counters(cursor: Any, firsts: Mapping[str, int]) -> None:
        """Raise the counters of tables that are below their first id; two queries per table at most.

        A higher one stays: lowering it would hand out ids of deleted rows again.

        :param cursor: in the schema of the tables, which exist.
        :param firsts: table -> the first id that it counts.
        """
        raise NotImplementedError

    def execute_sql_flush(self, sql_list: Any) -> None:
        # Overrides BaseDatabaseOperations.execute_sql_flush: neither DELETE nor TRUNCATE of
        # whole tables has a compiler.
        with observer.table_flush(self.connection):
            super().execute_sql_flush(sql_list)
