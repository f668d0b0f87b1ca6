"""The parts of a shard group's connection object that refuse SQL. A group has no database of its
own: only its shards have databases.
"""

from __future__ import annotations

from io import UnsupportedOperation
from typing import TYPE_CHECKING, Any, NoReturn

from django.db.backends.base.client import BaseDatabaseClient
from django.db.backends.base.introspection import BaseDatabaseIntrospection
from django.db.backends.base.operations import BaseDatabaseOperations

from sharded_orm.exceptions import GroupAliasError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django.core.management.color import Style


def group_alias_error(alias: str, what: str = "run SQL") -> GroupAliasError:
    return GroupAliasError(
        f"The alias {alias!r} stands for all shards of the group and has no database of its own:"
        f" it cannot {what}. Use a sharded model's manager, which routes to the shard; name one"
        f" shard, such as {alias + '_00000'!r}; or migrate all of them with 'migrate_shards'."
    )


class GroupConnection:
    """Stands for the database session of a group's connection object, which has none.

    While that object counts as connected, its attribute ``connection`` is a ``GroupConnection``.
    The methods ``close``, ``commit`` and ``rollback`` do nothing. Reading any other attribute
    raises :exc:`GroupAliasError`.
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

    def commit(self) -> None:
        pass

    def rollback(self) -> None:
        pass


class GroupIntrospection(BaseDatabaseIntrospection):
    """Introspection of a group's alias. It finds no tables, because only shards have tables."""

    def table_names(self, cursor: Any = None, include_views: bool = False) -> list[str]:
        return []

    def get_table_list(self, cursor: Any) -> list[Any]:
        return []

    def sequence_list(self) -> list[Any]:
        return []


class GroupOperations(BaseDatabaseOperations):
    """The ``ops`` of a group's alias.

    In tests, a flush of the alias gives each shard the rows again that it had after its migrations.
    Outside of tests, a flush is refused.
    """

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
