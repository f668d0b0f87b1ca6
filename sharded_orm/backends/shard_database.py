"""What operators' commands ask a shard or its node; each backend's ``DatabaseWrapper`` answers.

They ask which schemas exist, how they are defined and how large they are.
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
    """The contract of a backend whose aliases may be shards. Only the wrapper's thread may use it."""

    def is_idle(self) -> bool:
        """Whether closing loses nothing: no results to read, no session state, no lease."""
        return True

    def create_shard_database(self) -> None:
        """Create the schema or file of this shard, empty; no error if it exists."""
        raise NotImplementedError

    def schema_snapshot(self) -> SchemaSnapshot:
        """Return the definitions of this alias's schema.

        Does not take part in an open transaction. Two round trips.

        :raises django.db.OperationalError: the schema does not exist.
        """
        raise NotImplementedError

    def schema_glance(self, known: SchemaSnapshot, tables: Sequence[str]) -> SchemaSnapshot:
        """Return ``known`` with ``tables`` as they are now, with new tables and without dropped ones.

        A new table may have no definition. Triggers, routines, and definitions and counters of
        other tables are those of ``known``. Cheaper than :meth:`schema_snapshot`: one round trip.

        :raises django.db.Error: one of ``tables`` does not exist.
        """
        return self.schema_snapshot()

    def build_schema(self, definitions: SchemaSnapshot) -> None:
        """Create what ``definitions`` has and this alias's schema, which must exist, lacks.

        Repeatable: an existing table stays as it is. Must not run in a transaction.
        """
        raise NotImplementedError

    def applied_digests(self, shards: Sequence[Shard]) -> dict[str, str | None]:
        """Return alias of each shard -> a digest of its applied migrations.

        "" without ``django_migrations``, None if the schema does not exist. Equal digests mean
        equal sets of migrations.

        :param shards: on the node of this alias. Their connection objects are not used.
        """
        raise NotImplementedError

    def schemas_present(self) -> set[str]:
        """Return the names of all schemas (SQLite: files) on the node of this alias."""
        raise NotImplementedError

    def shard_sizes(self, shards: Sequence[Shard]) -> dict[str, ShardSize]:
        """Return alias of each shard -> its size, 0 if it does not exist; one query.

        :param shards: on the node of this alias. Their connection objects are not used.
        """
        raise NotImplementedError

    def table_sizes(self, shard: Shard) -> list[TableSize]:
        """Return the tables of ``shard`` by name; one query (SQLite: one per table).

        Empty if the schema does not exist.

        :param shard: on the node of this alias.
        """
        raise NotImplementedError

    def column_types(
        self, shards: Sequence[Shard], tables: Sequence[str], columns: Sequence[str]
    ) -> ColumnTypes:
        """Return the types of ``columns`` in ``tables`` of ``shards``; one query per 500 shards.

        All names but the aliases are in lower case; columns that do not exist are left out. The
        query log has no entry. Only with ``features.can_introspect_collations``.

        :param shards: on the node of this alias. If it is this shard alone, the statement takes part
            in its transaction; else their connection objects are not used.
        """
        raise NotImplementedError

    def open_sessions(self) -> OpenSessions | None:
        """Count the sessions of this alias's node; None if there is no server. One query."""
        return None

    def effect_of(self, sql: str) -> Effect:
        """Return what a statement changes, judged by its text."""
        raise NotImplementedError

    def lock_schema(self, seconds: float) -> bool:
        """Keep other sessions from migrating this schema until :meth:`unlock_schema`.

        False if the lock was not free in time. :meth:`close` releases the lock as well, and ends the
        session. If a client dies, its lock is held until the server has finished its statement.
        Without a server, the method does nothing and returns True.

        :param seconds: to wait for the lock.
        """
        return True

    def unlock_schema(self) -> None:
        """Release the lock of :meth:`lock_schema`, if it is held."""

    def structural_copy(
        self, definitions: SchemaSnapshot, schema: str
    ) -> AbstractContextManager[Self]:
        """A context manager: a connection to an empty schema with these definitions.

        The schema is on the same server. The connection has this alias and belongs to no group. The
        schema is dropped at the end of the block, and at its start if an earlier one was left.

        :param schema: its name, where schemas have names. An existing schema of that name is lost.
        """
        raise NotImplementedError

    @classmethod
    def server_settings(cls, settings_dict: dict[str, Any]) -> dict[str, Any]:
        """The settings of a connection to the node that is in no shard's database."""
        return {**settings_dict, "NAME": ""}
