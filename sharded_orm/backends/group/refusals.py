"""The parts of a shard group's connection object that refuse SQL. A group has no database of its
own: only its shards have databases.
"""

from __future__ import annotations

from functools import cache
from io import UnsupportedOperation
from typing import TYPE_CHECKING, Any, NoReturn

from django.db.backends.base.client import BaseDatabaseClient
from django.db.backends.base.introspection import BaseDatabaseIntrospection
from django.db.backends.base.operations import BaseDatabaseOperations

from sharded_orm.exceptions import GroupAliasError, ShardKeyRequired

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django.core.management.color import Style
    from django.db.models.sql.compiler import SQLCompiler


def group_alias_error(alias: str, what: str = "run SQL") -> GroupAliasError:
    return GroupAliasError(
        f"The alias {alias!r} stands for all shards of the group and has no database of its own:"
        f" it cannot {what}. Use a sharded model's manager, which routes to the shard; name one"
        f" shard, such as {alias + '_00000'!r}; or migrate all of them with 'migrate_shards'."
    )


class GroupConnection:
    """Stands for the database session of a group's connection object, which has none.

    While that object counts as connected, its attribute ``connection`` is a ``GroupConnection``.
    The method ``close`` does nothing. Reading any other attribute raises :exc:`GroupAliasError`.
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise group_alias_error(self._alias, f"be asked for {name!r} of a session")

    def fileno(self) -> NoReturn:
        # Raise the error that Python's own objects raise if they have no file descriptor. A child
        # process of Celery closes the descriptors of all database connections, and expects this
        # error.
        raise UnsupportedOperation(str(group_alias_error(self._alias, "have a file descriptor")))

    def close(self) -> None:
        pass


class GroupIntrospection(BaseDatabaseIntrospection):
    """Introspection of a group's alias. It finds no tables, because only shards have tables."""

    def table_names(self, cursor: Any = None, include_views: bool = False) -> list[str]:
        return []

    def get_table_list(self, cursor: Any) -> list[Any]:
        return []

    def sequence_list(self) -> list[Any]:
        return []


@cache
def _refusing_conditions(compiler: type[SQLCompiler]) -> type[SQLCompiler]:
    """Return a subclass of ``compiler`` that refuses a query without a model.

    ``Q.check()`` sends such a query when a model validates its constraints. On a group's alias, the
    query would fail with :exc:`GroupAliasError`. This is a database error, and ``Q.check()``
    ignores database errors and takes the condition as fulfilled. So raise another error.
    """

    def execute_sql(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.query.model is None:
            raise ShardKeyRequired(
                f"A condition is checked by a database, and the alias {self.connection.alias!r} stands for all"
                " shards of the group. Name the shard of the row: using=router.db_for_read(type(row), instance=row)."
            )
        return compiler.execute_sql(self, *args, **kwargs)

    return type(compiler.__name__, (compiler,), {"execute_sql": execute_sql})


class GroupOperations(BaseDatabaseOperations):
    """The ``ops`` of a group's alias.

    In tests, a flush of the alias restores, on each shard, the rows that existed after the
    migrations. Outside of tests, a flush is refused.
    """

    def compiler(self, compiler_name: str) -> type[SQLCompiler]:
        return _refusing_conditions(super().compiler(compiler_name))  # type: ignore[arg-type]  # classes are hashable

    def sql_flush(
        self,
        style: Style,
        tables: Iterable[str],
        *,
        reset_sequences: bool = False,
        allow_cascade: bool = False,
    ) -> list[str]:
        return []

    def sequence_reset_by_name_sql(self, style: Style | None, sequences: list[Any]) -> list[str]:
        connection: Any = self.connection
        if connection.tests is not None:
            connection.tests.reset_sequences()
        return []

    def execute_sql_flush(self, sql_list: Iterable[str]) -> None:
        # Django calls this method even for an empty ``sql_list``, which sql_flush() returns for a
        # group. So do the flush here.
        connection: Any = self.connection
        if connection.tests is None:
            raise group_alias_error(connection.alias, "be flushed")
        connection.tests.restore_touched()


class GroupClient(BaseDatabaseClient):
    def runshell(self, parameters: Iterable[str]) -> None:
        raise group_alias_error(self.connection.alias, "open a shell")
