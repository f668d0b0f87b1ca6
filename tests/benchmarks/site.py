"""The Django project that is measured: settings, schemas, rows."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import django
from django.conf import settings
from django.db import connections
from django.db.utils import load_backend

from tests.benchmarks.database import Database
from tests.services.addresses import ServerAddress

#: Rows of one user; each shard has this many users.
ROWS, USERS = 40, 3
GROUPS = ("photos", "uploads", "placed", "packed")
UPLOAD_SHARDS = 16
PLACED_SHARDS = 4
PACKED_SHARDS = 1
#: Shards of the group for the request signals; most of them do not exist.
CONFIGURED = 4096
START = datetime(2026, 1, 1, tzinfo=UTC)


def configure(
    database: Database,
    address: ServerAddress,
    prefix: str,
    shards: int,
    groups: Sequence[str] = GROUPS,
) -> None:
    """Set Django up with groups of shards; without groups, as a project that has one database."""
    explicit = {"default": database.database(address, f"{prefix}_global")}
    common: dict[str, Any] = {
        "SECRET_KEY": "benchmarks",
        "USE_TZ": True,
        "TIME_ZONE": "UTC",
        "DEFAULT_AUTO_FIELD": "django.db.models.BigAutoField",
    }
    if not groups:
        settings.configure(**common, DATABASES=explicit)
        django.setup()
        return
    from sharded_orm.topology.aliases import sharded_databases

    def group(strategy: str, count: int) -> dict[str, Any]:
        return {
            "STRATEGY": strategy,
            "RANGES": [{"range": (0, count - 1), "primary": "node"}],
            "DATABASE_NAME": prefix + "_{group}_{shard:05d}",
        }

    settings.configure(
        **common,
        DATABASES=sharded_databases(explicit),
        DATABASE_ROUTERS=["sharded_orm.routers.ShardRouter"],
        INSTALLED_APPS=[
            "sharded_orm",
            "sharded_orm.contrib.lookups",
            "tests.benchmarks",
            "tests.benchmarks.finders",
            "tests.benchmarks.made_ids",
        ],
        SHARDED_ORM={
            "NODES": {"node": database.node(address)},
            "GROUPS": {
                name: group(strategy, count)
                for name, strategy, count in (
                    ("photos", "modulo", shards),
                    ("uploads", "modulo", UPLOAD_SHARDS),
                    ("placed", "directory", PLACED_SHARDS),
                    ("packed", "embedded", PACKED_SHARDS),
                )
                if name in groups
            },
            "TICKETS": ["default"],
            "DIRECTORY": "default",
        },
    )
    django.setup()


def new_prefix() -> str:
    """Return the start of the names of all schemas of a run."""
    return f"bench_{secrets.token_hex(3)}"


class Site:
    """The schemas of a run, and a stock alias for each shard.

    The stock aliases are put into ``connections`` by hand: Django would walk entries of
    ``DATABASES`` on every request, on our side of the comparison as well.
    """

    def __init__(
        self, database: Database, address: ServerAddress, prefix: str, shards: int
    ) -> None:
        self.database, self.address, self.prefix, self.shards = database, address, prefix, shards
        self._schemas: list[str] = []

    def stock(self, alias: str) -> str:
        """Return the alias of this thread's stock connection to the schema of ``alias``."""
        name = f"stock_{alias}"
        if not hasattr(connections._connections, name):  # type: ignore[attr-defined]
            entry = self.database.stock_settings(connections.settings[alias])
            connections[name] = load_backend(entry["ENGINE"]).DatabaseWrapper(entry, name)
        return name

    def session(self) -> AbstractContextManager[Any]:
        """Return a cursor of the driver, in autocommit, where all schemas can be named."""
        return self.database.session(self.address)

    @contextmanager
    def made(self) -> Iterator[None]:
        """Create global tables, shards and rows; drop them at the end."""
        try:
            self._make_global()
            self._make_shards()
            yield
        finally:
            with self.session() as cursor:
                for schema in self._schemas:
                    cursor.execute(self.database.drop_schema(schema))
                cursor.execute(self.database.drop_database(f"{self.prefix}_global"))

    def _create(self, cursor: Any, schema: str) -> None:
        self._schemas.append(schema)
        cursor.execute(f"CREATE SCHEMA {schema}")

    def _make_global(self) -> None:
        from sharded_orm import runtime
        from sharded_orm.contrib.lookups.models import LookupEntry, LookupState
        from sharded_orm.models.tables.directory import Placement
        from sharded_orm.models.tables.key_move import KeyMove
        from sharded_orm.operations.tickets import begin, declared_sequences

        with self.session() as cursor:
            cursor.execute(f"CREATE DATABASE {self.prefix}_global")
        with connections["default"].schema_editor() as editor:
            for model in (Placement, KeyMove, LookupEntry, LookupState):
                editor.create_model(model)
        for server in runtime.tickets().servers:
            begin(server, declared_sequences())

    def _make_shards(self) -> None:
        from tests.benchmarks.models import Photo

        template = f"{self.prefix}_photos_00000"
        schemas = [f"{self.prefix}_photos_{number:05d}" for number in range(1, self.shards)]
        schemas += [f"{self.prefix}_uploads_{number:05d}" for number in range(UPLOAD_SHARDS)]
        schemas += [f"{self.prefix}_placed_{number:05d}" for number in range(PLACED_SHARDS)]
        schemas += [f"{self.prefix}_packed_{number:05d}" for number in range(PACKED_SHARDS)]
        with self.session() as cursor:
            self._create(cursor, template)
            with connections["photos_00000"].schema_editor() as editor:
                editor.create_model(Photo)
            self._fill_template(cursor, template)
            for schema in schemas:
                self._create(cursor, schema)
                cursor.execute(self.database.copy_table(f"{template}.photo", f"{schema}.photo"))
            for number in range(1, self.shards):
                # Ids are unique over all shards; keys are those of the shard.
                posted_at = self.database.later.format(
                    "posted_at", f"MOD(photo_id * {number}, 9973)"
                )
                cursor.execute(
                    f"INSERT INTO {self.prefix}_photos_{number:05d}.photo"
                    " (photo_id, user_id, title, posted_at, stars)"
                    f" SELECT photo_id + {number * ROWS * USERS}, user_id + {number}, title,"
                    f" {posted_at}, stars FROM {template}.photo"
                )
            for statement in self.database.ready:
                cursor.execute(statement)

    def _fill_template(self, cursor: Any, template: str) -> None:
        first = datetime.fromtimestamp(1_700_000_000, UTC)
        rows = [
            (
                n + 1,
                (n % USERS) * self.shards,
                f"Photo number {n}",
                first + timedelta(minutes=n),
                n % 6,
            )
            for n in range(ROWS * USERS)
        ]
        cursor.executemany(
            f"INSERT INTO {template}.photo (photo_id, user_id, title, posted_at, stars)"
            " VALUES (%s, %s, %s, %s, %s)",
            rows,
        )

    def photo(self, number: int) -> tuple[int, int]:
        """Return (user, id) of a photo on shard ``number``."""
        return number, number * ROWS * USERS + 1
