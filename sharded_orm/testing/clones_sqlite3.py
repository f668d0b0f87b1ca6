"""Creates test shards on SQLite, by copying the file of the template."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sharded_orm import database_settings
from sharded_orm.backends.sqlite3.base import DatabaseWrapper
from sharded_orm.models.after_migrate.auto_increment import first_ids
from sharded_orm.testing.clones import Cloner
from sharded_orm.topology.model import Shard


class SQLiteCloner(Cloner):
    """Creates test shards by copying the template's file.

    If the file of a test shard exists already, SQLite's backup function overwrites its contents. It
    respects the locks of other connections.
    """

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
        # Copy to a temporary name and rename the file at the end, so that no thread opens an incomplete
        # file.
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
    """Make the id counters of tables with packed ids begin at the first id of ``shard``.

    A packed id contains the number of its shard, so the first id differs from shard to shard.
    """
    all_firsts = first_ids(shard)
    if not all_firsts:
        return
    present = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    firsts = {table: first for table, first in all_firsts.items() if table in present}
    with connection:
        DatabaseWrapper.ops_class.raise_counters(connection, firsts)


def _path(shard: Shard) -> Path:
    settings: dict[str, Any] = database_settings.shard_settings(shard)
    return Path(settings["NAME"])
