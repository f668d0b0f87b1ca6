"""A group of shards of the test's own with the app ``tests.fleet``, on the servers of the run."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.db import connections
from django.db.migrations.recorder import MigrationRecorder
from django.test import modify_settings, override_settings

from sharded_orm import database_settings, runtime
from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.operations.migrate import MigrateOptions, Migrator
from sharded_orm.operations.runs import journal
from sharded_orm.topology.aliases import complete
from sharded_orm.topology.model import Shard, ShardGroup, ShardRange

GROUP = "fleet"
COUNT = 8
# Each state of each migration renders the models of all apps. Besides Django's own apps and ours,
# one with migrations (photos) and one without (samples) are enough.
APPS = {
    "append": "tests.fleet",
    "remove": [
        "tests.cached",
        "tests.relatives.plain",
        "tests.relatives.sharded",
        "tests.twins",
    ],
}
NEVER = lambda: False  # noqa: E731 (a callable, as the engine takes it)


@dataclass
class Fleet:
    """Shards 0 to 3 on one node, 4 to 7 on another; none of them exists at first."""

    group: ShardGroup
    created: set[str] = field(default_factory=set)

    def shard(self, number: int) -> Shard:
        return self.group.shard(number)

    def create(self, *numbers: int) -> list[Shard]:
        """Create empty schemas or files."""
        shards = [self.shard(number) for number in numbers]
        for shard in shards:
            self.connection(shard).create_shard_database()
            self.created.add(shard.alias)
        return shards

    def connection(self, shard: Shard | int) -> Any:
        return connections[(shard if isinstance(shard, Shard) else self.shard(shard)).alias]

    def migrate_with_django(self, number: int, *target: str, **options: Any) -> None:
        """Migrate a shard with Django's command ``migrate``."""
        call_command(
            "migrate", *target, database=self.shard(number).alias, verbosity=0, interactive=False,
            **options,
        )  # fmt: skip

    def migrate(
        self,
        *numbers: int,
        target: tuple[str | None, str | None] = (None, None),
        stopping: Any = NEVER,
        **options: Any,
    ) -> None:
        """Migrate with our engine. It continues unfinished runs, and raises the first error."""
        with self.run() as run:
            migrator = Migrator(self.group, MigrateOptions(target, **options), journal.Scripts())
            run.create_steps(self.shard(number).alias for number in numbers)
            for number in numbers:
                step = run.step(self.shard(number).alias)
                migrator.migrate(self.shard(number), step, stopping=stopping)
                step.mark_done()
            run.finish()

    @contextmanager
    def run(self) -> Iterator[journal.JournalRun]:
        with journal.hold_run("migrate", GROUP, {}) as run:
            yield run

    def settle(self, number: int, *, done: bool) -> None:
        """Settle an unclear operation on a shard, as an operator does."""
        with self.run() as run:
            run.create_steps([self.shard(number).alias])
            migrator = Migrator(self.group, MigrateOptions(), journal.Scripts())
            migrator.settle(run.step(self.shard(number).alias), done)

    def schema(self, number: int) -> SchemaSnapshot:
        snapshot: SchemaSnapshot = self.connection(number).schema_snapshot()
        return snapshot

    def applied(self, number: int) -> list[tuple[str, str]]:
        """Return the applied migrations, in the order of their records."""
        rows = MigrationRecorder.Migration.objects.using(self.shard(number).alias)
        return list(rows.order_by("id").values_list("app", "name"))

    def execute(self, number: int, sql: str, params: Any = None) -> list[Any]:
        with self.connection(number).cursor() as cursor:
            cursor.execute(sql, params)
            return list(cursor.fetchall()) if cursor.description else []

    def assert_same(self, number: int, other: int) -> None:
        """Check that tables, columns, indexes, constraints and records are equal."""
        self.assert_same_schema(number, other)
        assert self.applied(number) == self.applied(other)

    def assert_same_schema(self, number: int, other: int) -> None:
        assert self.schema(number).differences(self.schema(other)) == []

    def drop(self) -> None:
        for alias in self.created:
            connection: Any = connections[alias]
            if connection.vendor != "sqlite":
                connection.drop_shard_database()
            connection.close()
            connection.group_wrapper.shards.forget(connection)


def nodes(folder: Path) -> dict[str, dict[str, Any]]:
    """Return settings of two nodes like those of the test settings."""
    nodes = {}
    for name, node in zip(
        ("fleet_1", "fleet_2"), settings.SHARDED_ORM["NODES"].values(), strict=True
    ):
        nodes[name] = complete(dict(node))
        if node["ENGINE"] == "sharded_orm.backends.sqlite3":
            nodes[name]["NAME"] = str(folder / name)
    return nodes


_FIRST = """
from django.db import migrations, models
from tests.integration.migrate.engine import failing

class Migration(migrations.Migration):
    operations = [
        migrations.CreateModel("Album", [
            ("id", models.BigAutoField(primary_key=True)),
            ("user_id", models.BigIntegerField()),
            ("name", models.CharField(max_length=60)),
        ]),
    ]
"""
_NEXT = """
from django.db import migrations, models
from sharded_orm.models import PackedIDField
from tests.integration.migrate.engine import failing

class Migration(migrations.Migration):
    atomic = {atomic}
    dependencies = [("fleet", "{before}")]
    operations = [{operations}]
"""


class Migrations:
    """Migrations that replace those of the app; the first one creates ``Album``."""

    _made = count()

    def __init__(self, folder: Path) -> None:
        self.name = f"fleet_migrations_{next(self._made)}"
        self._folder = folder / self.name
        self._folder.mkdir()
        (self._folder / "__init__.py").touch()
        self._last = "0001_first"
        (self._folder / "0001_first.py").write_text(_FIRST)

    def add(self, name: str, *operations: str, atomic: bool = False) -> None:
        """Add the next migration. Without ``atomic`` all backends run it step by step."""
        text = _NEXT.format(before=self._last, operations=", ".join(operations), atomic=atomic)
        self.write(name, text)
        self._last = name

    def change(self, name: str, old: str, new: str) -> None:
        """Rewrite a migration, as a deployment does."""
        path = self._folder / f"{name}.py"
        assert old in path.read_text()
        self.write(name, path.read_text().replace(old, new))

    def write(self, name: str, text: str) -> None:
        (self._folder / f"{name}.py").write_text(text)
        sys.modules.pop(f"{self.name}.{name}", None)
        importlib.invalidate_caches()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        sys.path.insert(0, str(self._folder.parent))
        sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
        try:
            with override_settings(MIGRATION_MODULES={"fleet": self.name}):
                yield
        finally:
            sys.dont_write_bytecode = before
            sys.path.remove(str(self._folder.parent))


@contextmanager
def global_database(folder: Path) -> Iterator[None]:
    """Replace ``default`` by an empty database, in all threads."""
    settings_before, connection_before = connections.settings["default"], connections["default"]
    settings = dict(settings_before)
    on_server = connection_before.vendor != "sqlite"
    settings["NAME"] = (
        f"fleet_{os.getpid()}_default" if on_server else str(folder / "default.sqlite3")
    )
    connections.settings["default"] = settings
    del connections["default"]
    connection: Any = connections["default"]
    try:
        if on_server:
            _drop_database(connection)
            _on_server(connection, "CREATE DATABASE {}")
        yield
    finally:
        connection.close()
        if on_server:
            _drop_database(connection)
        connections.settings["default"] = settings_before
        connections["default"] = connection_before


def _drop_database(connection: Any) -> None:
    # Our sessions with it are in the pool of a node, where they stay.
    force = " WITH (FORCE)" if connection.vendor == "postgresql" else ""
    _on_server(connection, f"DROP DATABASE IF EXISTS {{}}{force}")


def _on_server(connection: Any, statement: str) -> None:
    name = connection.ops.quote_name(connection.settings_dict["NAME"])
    with connection._nodb_cursor() as cursor:
        cursor.execute(statement.format(name))


@contextmanager
def fleet(folder: Path) -> Iterator[Fleet]:
    """Add the group to the topology of this process during the block."""
    half = COUNT // 2
    group = ShardGroup(
        GROUP,
        (ShardRange(0, half - 1, "fleet_1"), ShardRange(half, COUNT - 1, "fleet_2")),
        "embedded",
        # Other processes may run the same tests on the same server.
        database_name=f"fleet_{os.getpid()}_{{shard:05d}}",
    )
    topology = runtime.topology()
    runtime.swap(
        replace(
            topology,
            nodes={**topology.nodes, **nodes(folder)},
            groups={**topology.groups, GROUP: group},
        )
    )
    connections.settings[GROUP] = complete(database_settings.group_settings(group))
    fleet = Fleet(group)
    try:
        with global_database(folder), modify_settings(INSTALLED_APPS=APPS):
            call_command("migrate", "sharded_orm", database="default", verbosity=0)
            yield fleet
    finally:
        fleet.drop()
        connections[GROUP].close()
        del connections[GROUP]
        del connections.settings[GROUP]
        runtime.swap(topology)
