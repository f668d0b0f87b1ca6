"""Django's SQLite backend, with one file for each shard.

With SQLite, a node is a folder, which contains the files of its shards. (With the other backends, a
node is a database server.) Unlike Django's backend, this one does not create the file of a shard
when it connects. Only :meth:`DatabaseWrapper.create_shard_database` creates it.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from django.core.exceptions import ImproperlyConfigured
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.sqlite3 import base
from django.db.transaction import Atomic

from sharded_orm.backends.group import relocation
from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.backends.missing_parts import creation_remedy
from sharded_orm.backends.sizes import ShardSize, TableSize
from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.backends.sqlite3 import snapshot
from sharded_orm.backends.sqlite3.change_capture import SQLiteChangeCapture
from sharded_orm.backends.sqlite3.creation import DatabaseCreation
from sharded_orm.backends.sqlite3.features import DatabaseFeatures
from sharded_orm.backends.sqlite3.operations import DatabaseOperations
from sharded_orm.backends.sqlite3.row_copy import SQLiteRowCopy
from sharded_orm.backends.sqlite3.schema import DatabaseSchemaEditor
from sharded_orm.backends.sqlite3.schema_move import SQLiteSchemaMove
from sharded_orm.backends.statements import Effect
from sharded_orm.backends.write_hooks.commit import CommitOutcome
from sharded_orm.exceptions import ShardDatabaseMissing

if TYPE_CHECKING:
    from sharded_orm.topology.model import Shard

# The end of the URI with which a shard's file is opened. In this mode, SQLite reads and writes the
# file, but does not create it.
_EXISTING_ONLY = "?mode=rw"


class _Immediate(Atomic):
    """An atomic block that locks the file for writing from the start (``BEGIN IMMEDIATE``).

    An ordinary transaction that begins with a read asks for the write lock only at its first write.
    If another connection is writing then, SQLite refuses the lock at once, without waiting. With
    ``BEGIN IMMEDIATE``, the transaction waits for the lock instead.
    """

    def __init__(self, wrapper: DatabaseWrapper) -> None:
        super().__init__(wrapper.alias, savepoint=False, durable=False)
        self._wrapper = wrapper

    def __enter__(self) -> None:
        wrapper = self._wrapper
        mode = wrapper.transaction_mode
        wrapper.transaction_mode = mode or "IMMEDIATE"
        try:
            super().__enter__()
        finally:
            wrapper.transaction_mode = mode


class DatabaseWrapper(ShardConnectionMixin, base.DatabaseWrapper):
    """The connection object of a shard, or of an ordinary alias of ``DATABASES``."""

    creation_class = DatabaseCreation
    features_class = DatabaseFeatures
    ops_class = DatabaseOperations
    SchemaEditorClass = DatabaseSchemaEditor
    two_phase_refusal = (
        "SQLite cannot prepare a transaction, which is to keep it for a later commit even if the"
        " process dies. Use MariaDB, MySQL or PostgreSQL"
    )
    transaction_mode: str | None
    # How many references (sys.getrefcount()) the driver's connection object has while no cursor is
    # open. is_idle() compares with this number to find out whether a cursor is open now.
    _references = 0

    def get_connection_params(self) -> dict[str, Any]:
        params: dict[str, Any] = super().get_connection_params()
        if self.shard is not None:
            params["database"] = Path(params["database"]).absolute().as_uri() + _EXISTING_ONLY
        return params

    def check_parameters(self, params: dict[str, Any]) -> None:
        try:
            sqlite3.connect(**{**params, "database": ":memory:"}).close()
        except (TypeError, ValueError) as exc:
            raise ImproperlyConfigured(f"The driver refuses OPTIONS: {exc}.") from exc

    def get_new_connection(self, conn_params: dict[str, Any]) -> sqlite3.Connection:
        made: list[sqlite3.Connection] = []
        factory = conn_params.get("factory", sqlite3.Connection)

        def make(*args: Any, **kwargs: Any) -> sqlite3.Connection:
            made.append(factory(*args, **kwargs))
            return made[-1]

        try:
            connection: sqlite3.Connection = super().get_new_connection(
                {**conn_params, "factory": make}
            )
            if self._touched is not None:
                # This is a test database. Write without waiting for the disk, because a test database
                # need not survive a power cut.
                connection.execute("PRAGMA synchronous = OFF")
                connection.execute("PRAGMA journal_mode = MEMORY")
            # Drop the reference to the connection in this list, so that sys.getrefcount() below
            # does not count it.
            made.clear()
        except TypeError:
            self.check_parameters(conn_params)
            raise
        except sqlite3.DatabaseError as exc:
            # The file was opened, but then a statement failed, for example because the file is no
            # database. Close the connection.
            for opened in made:
                opened.close()
            if not isinstance(exc, sqlite3.OperationalError):
                raise
            if self.shard is None or Path(self.settings_dict["NAME"]).exists():
                raise
            raise ShardDatabaseMissing(
                f"Shard {self.alias!r} has no database: there is no file"
                f" {str(self.settings_dict['NAME'])!r} on node {self.shard.node!r}."
                f" {creation_remedy(self.alias)}, or correct NAME of the node."
            ) from exc
        self._references = sys.getrefcount(connection)
        return connection

    def create_shard_database(self) -> None:
        """Create the shard's empty file, and its folder if needed. Does nothing if the file exists."""
        relocation.follow(self)
        path = Path(self.settings_dict["NAME"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def prepare_database(self) -> None:
        if self.shard is not None:
            self.create_shard_database()
        super().prepare_database()

    @classmethod
    def database_of(cls, node: Mapping[str, Any], schema: str) -> dict[str, Any]:
        return {"NAME": str(Path(node["NAME"]) / f"{schema}{snapshot.SUFFIX}")}

    @classmethod
    def server_settings(cls, settings_dict: dict[str, Any]) -> dict[str, Any]:
        return {**settings_dict, "NAME": ":memory:"}

    # ##### Schemas #####

    def schema_snapshot(self) -> SchemaSnapshot:
        self.ensure_connection()
        with self.wrap_database_errors:
            return snapshot.read(self.connection)

    def build_schema(self, definitions: SchemaSnapshot) -> None:
        self.ensure_connection()
        with self.wrap_database_errors:
            snapshot.build(self.connection, definitions)

    def applied_digests(self, shards: Sequence[Shard]) -> dict[str, str | None]:
        folder = Path(self.settings_dict["NAME"]).parent
        with self.wrap_database_errors:
            return snapshot.digests(
                (shard.alias, folder / f"{shard.schema}{snapshot.SUFFIX}") for shard in shards
            )

    def schemas_present(self) -> set[str]:
        return snapshot.names(Path(self.settings_dict["NAME"]).parent)

    def shard_sizes(self, shards: Sequence[Shard]) -> dict[str, ShardSize]:
        folder = Path(self.settings_dict["NAME"]).parent
        paths = {shard.alias: folder / f"{shard.schema}{snapshot.SUFFIX}" for shard in shards}
        # The number of rows is None (not known), because SQLite would have to count the rows.
        return {
            alias: ShardSize(path.stat().st_size if path.exists() else 0, None)
            for alias, path in paths.items()
        }

    def table_sizes(self, shard: Shard) -> list[TableSize]:
        path = Path(self.settings_dict["NAME"]).parent / f"{shard.schema}{snapshot.SUFFIX}"
        with self.wrap_database_errors:
            return snapshot.table_sizes(path)

    def effect_of(self, sql: str) -> Effect:
        return snapshot.effect_of(sql)

    def statements_sent(self) -> int | None:
        return None

    @contextmanager
    def structural_copy(self, definitions: SchemaSnapshot, schema: str) -> Iterator[Self]:
        settings = {k: v for k, v in self.settings_dict.items() if k != "SHARD"}
        copy = type(self)({**deepcopy(settings), "NAME": ":memory:"}, self.alias)
        try:
            copy.build_schema(definitions)
            yield copy
        finally:
            # Call close() of the base class, because close() of Django's SQLite backend never
            # closes a database in memory.
            BaseDatabaseWrapper.close(copy)

    def change_capture(self, account: Mapping[str, Any] | None = None) -> SQLiteChangeCapture:
        return SQLiteChangeCapture(self._stock_wrapper())

    def row_copy(self, account: Mapping[str, Any] | None = None) -> SQLiteRowCopy:
        return SQLiteRowCopy(self._stock_wrapper())

    def schema_move(
        self, confirm: Callable[[], None], account: Mapping[str, Any] | None = None
    ) -> SQLiteSchemaMove:
        return SQLiteSchemaMove(self._stock_wrapper(), confirm)

    def _stock_wrapper(self) -> base.DatabaseWrapper:
        settings = {k: v for k, v in self.settings_dict.items() if k not in ("SHARD", "GENERATION")}
        return base.DatabaseWrapper(deepcopy(settings), self.alias)

    def is_idle(self) -> bool:
        # Each cursor with unread rows holds a reference to the driver's connection object. If there
        # are not more references than without a cursor, no cursor has unread rows.
        return self.connection is None or sys.getrefcount(self.connection) <= self._references

    def holds_session(self) -> bool:
        return self.connection is not None and self.connection.in_transaction

    def write_transaction(self) -> Atomic:
        # Call the base class only because of its check. It raises an error if this object is not
        # the thread's connection of the alias.
        super().write_transaction()
        return _Immediate(self)

    def commit_outcome(self) -> CommitOutcome:
        if self.connection is not None and self.connection.in_transaction:
            return CommitOutcome.OPEN
        return CommitOutcome.OVER
