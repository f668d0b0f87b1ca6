"""Creation of test shards: the contract of a cloner, and the one of SQLite."""

from __future__ import annotations

import os
import shutil
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from sharded_orm import runtime
from sharded_orm.backends.sqlite3.base import DatabaseWrapper
from sharded_orm.models.after_migrate.auto_increment import first_ids
from sharded_orm.topology.model import Shard


class Cloner(ABC):
    """Creates databases with the tables and rows of a template, the schema that was migrated.

    Not thread-safe: the caller has a lock.
    """

    @abstractmethod
    def create_template(self, template: Shard, *, keep: bool) -> None:
        """Create the template's database.

        :param keep: use an existing one, with its tables and rows.
        """

    @abstractmethod
    def load_template(self, template: Shard) -> None:
        """Read the tables and rows to clone. Called after the template was migrated."""

    @abstractmethod
    def clone(self, shard: Shard, *, keep: bool) -> None:
        """Create the database of ``shard``, in place of an existing one.

        :param keep: an existing one that has the same tables may be emptied instead.
        """

    @abstractmethod
    def restore(self, shard: Shard) -> None:
        """Replace the rows of a cloned shard by the template's."""

    def reset_sequences(self, shards: Iterable[Shard]) -> None:
        """Restart the counters of tables, if :meth:`restore` does not do so."""
        return

    def batch(self) -> AbstractContextManager[None]:
        """A context manager around several calls, which may share connections."""
        return nullcontext()

    @abstractmethod
    def drop(self, shards: Iterable[Shard]) -> None:
        """Drop the databases of ``shards`` that exist."""


class SQLiteCloner(Cloner):
    """Copies files; an existing file is overwritten in place, under SQLite's locks."""

    def __init__(self) -> None:
        self._template = Path()

    def create_template(self, template: Shard, *, keep: bool) -> None:
        path = _path(template)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not keep:
            path.unlink(missing_ok=True)

    def load_template(self, template: Shard) -> None:
        self._template = _path(template)

    def clone(self, shard: Shard, *, keep: bool) -> None:
        path = _path(shard)
        if path.exists():
            self.restore(shard)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when complete: another thread must not open half a file.
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        shutil.copyfile(self._template, unfinished)
        connection = sqlite3.connect(unfinished)
        try:
            _begin_counters(connection, shard)
        finally:
            connection.close()
        unfinished.rename(path)

    def restore(self, shard: Shard) -> None:
        source = sqlite3.connect(self._template)
        try:
            target = sqlite3.connect(_path(shard))
            try:
                target.execute("PRAGMA synchronous = OFF")
                source.backup(target)
                _begin_counters(target, shard)
            finally:
                target.close()
        except sqlite3.OperationalError as exc:
            exc.add_note(
                f"Shard {shard.alias!r} could not be emptied after a test: is a transaction or a"
                " cursor with unread rows left open, perhaps in another thread?"
            )
            raise
        finally:
            source.close()

    def drop(self, shards: Iterable[Shard]) -> None:
        for shard in shards:
            path = _path(shard)
            path.unlink(missing_ok=True)
            path.with_name(path.name + "-journal").unlink(missing_ok=True)


def _begin_counters(connection: sqlite3.Connection, shard: Shard) -> None:
    """Start packed ids at the numbers of ``shard``, which are not those of the template."""
    all_firsts = first_ids(shard)
    if not all_firsts:
        return
    present = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    firsts = {table: first for table, first in all_firsts.items() if table in present}
    with connection:
        DatabaseWrapper.ops_class.raise_counters(connection, firsts)


def _path(shard: Shard) -> Path:
    settings: dict[str, Any] = runtime.database_settings(shard)
    return Path(settings["NAME"])
