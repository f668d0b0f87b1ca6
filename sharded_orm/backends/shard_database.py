"""The contract of a backend whose aliases may be shards.

Everything that operations ask a shard or its node: what exists, what it looks like, how large
it is. Each backend's ``DatabaseWrapper`` overrides it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from sharded_orm.backends.sizes import ShardSize, TableSize
    from sharded_orm.backends.snapshot import SchemaSnapshot
    from sharded_orm.backends.statements import Effect
    from sharded_orm.backends.text_keys import ColumnTypes
    from sharded_orm.backends.write_hooks.session_id import OpenSessions
    from sharded_orm.topology.model import Shard


class ShardDatabaseMixin:
    """See the module. As all of a wrapper, for its own thread only."""

    def is_idle(self) -> bool:
        """Whether closing loses nothing: no open results, no session state, no lease."""
        return True

    def create_shard_database(self) -> None:
        """Create the schema or file of this shard, empty; no error when it exists."""
        raise NotImplementedError

    def schema_snapshot(self) -> SchemaSnapshot:
        """What this alias's schema looks like now.

        Asks the server apart from a transaction that is open. Costs two round trips.

        :raises django.db.OperationalError: the schema does not exist.
        """
        raise NotImplementedError

    def schema_glance(self, known: SchemaSnapshot, tables: Sequence[str]) -> SchemaSnapshot:
        """``known`` with the ``tables`` as they are now, and such as are new or gone; a table that is
        new may have no definition. Cheaper than :meth:`schema_snapshot`: one round trip. Triggers,
        routines, and definitions and counters of other tables, are those of ``known``.

        :raises django.db.Error: one of ``tables`` does not exist.
        """
        return self.schema_snapshot()

    def build_schema(self, definitions: SchemaSnapshot) -> None:
        """Make what is missing of ``definitions`` in this alias's schema, which must exist.

        Repeatable; a table that is there stays as it is. Must not run in a transaction.
        """
        raise NotImplementedError

    def applied_digests(self, shards: Sequence[Shard]) -> dict[str, str | None]:
        """Alias of each of ``shards`` -> a digest of the migrations that it has applied.

        "" if it has no ``django_migrations``, None if its schema does not exist. Equal digests
        are equal sets of migrations.

        :param shards: on the node of this alias. Their wrappers are not used.
        """
        raise NotImplementedError

    def schemas_present(self) -> set[str]:
        """The names of all schemas (SQLite: files) on the node of this alias."""
        raise NotImplementedError

    def shard_sizes(self, shards: Sequence[Shard]) -> dict[str, ShardSize]:
        """Alias of each of ``shards`` -> how large it is, 0 if it does not exist; one query.

        :param shards: on the node of this alias. Their wrappers are not used.
        """
        raise NotImplementedError

    def table_sizes(self, shard: Shard) -> list[TableSize]:
        """The tables of ``shard``, on the node of this alias, by name; one query (SQLite: one each).

        Empty if the schema does not exist.
        """
        raise NotImplementedError

    def column_types(
        self, shards: Sequence[Shard], tables: Sequence[str], columns: Sequence[str]
    ) -> ColumnTypes:
        """What those of ``columns`` are that ``tables`` of ``shards`` have; one query per 500 shards.

        All names but the aliases are in lower case; what does not exist is left out. Not in the
        log of queries. Only where a server knows more than the models do: not on SQLite.

        :param shards: on the node of this alias. If it is this one alone, the statement takes part
            in its transaction; else their wrappers are not used.
        """
        raise NotImplementedError

    def open_sessions(self) -> OpenSessions | None:
        """Of the node of this alias; None where there is no server. One query."""
        return None

    def effect_of(self, sql: str) -> Effect:
        """What a statement does, as its text tells."""
        raise NotImplementedError

    def lock_schema(self, seconds: float) -> bool:
        """Keep every other session from migrating this schema until :meth:`unlock_schema`.

        :meth:`close` gives the lock back as well, and ends the session. A statement that goes on in the
        server when its client is gone keeps the lock. Does nothing, and is true, where no server
        outlives its client.

        :param seconds: to wait for whoever has the lock; False if that was not enough.
        """
        return True

    def unlock_schema(self) -> None:
        """Give back what :meth:`lock_schema` took, if it took something."""

    def structural_copy(
        self, definitions: SchemaSnapshot, schema: str
    ) -> AbstractContextManager[Self]:
        """A connection to a schema without rows that looks like ``definitions``, for a block.

        It is on the same server, with this alias, and belongs to no group. It is dropped before
        (if it was left) and after.

        :param schema: its name, where it needs one. Whatever has that name is lost.
        """
        raise NotImplementedError

    @classmethod
    def server_settings(cls, settings_dict: dict[str, Any]) -> dict[str, Any]:
        """The settings of a connection to the node that is in no shard's database."""
        return {**settings_dict, "NAME": ""}
