"""The Django project that is measured: settings, schemas, rows."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import django
from django.conf import settings
from django.db import connections
from django.db.backends.mysql.base import DatabaseWrapper as StockWrapper

from tests.services.mariadb import Address

#: Rows of one user; each shard has this many users.
ROWS, USERS = 40, 3
GROUPS = ("photos", "uploads", "placed")
UPLOAD_SHARDS = 16
PLACED_SHARDS = 4
#: Shards of the group for the request signals; most of them do not exist.
CONFIGURED = 4096
START = datetime(2026, 1, 1, tzinfo=UTC)
_OPTIONS = {"charset": "utf8mb4", "isolation_level": "read committed"}
_STOCK = "django.db.backends.mysql"
_OURS = "sharded_orm.backends.mysql"


def configure(address: Address, prefix: str, shards: int, groups: Sequence[str] = GROUPS) -> None:
    """Set Django up with groups of shards; without groups, as a project that has one database."""
    connection = {**address.django(), "OPTIONS": _OPTIONS, "CONN_MAX_AGE": None}
    explicit = {"default": {"ENGINE": _STOCK, "NAME": f"{prefix}_global", **connection}}
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
        ],
        SHARDED_ORM={
            "NODES": {"node": {"ENGINE": _OURS, **connection}},
            "GROUPS": {
                name: group(strategy, count)
                for name, strategy, count in (
                    ("photos", "modulo", shards),
                    ("uploads", "modulo", UPLOAD_SHARDS),
                    ("placed", "directory", PLACED_SHARDS),
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

    def __init__(self, address: Address, prefix: str, shards: int) -> None:
        self.address, self.prefix, self.shards = address, prefix, shards
        self._schemas: list[str] = []

    def stock(self, alias: str) -> str:
        """Return the alias of this thread's stock connection to the schema of ``alias``."""
        name = f"stock_{alias}"
        if not hasattr(connections._connections, name):  # type: ignore[attr-defined]
            entry = connections.settings[alias]
            own = {key: value for key, value in entry.items() if key != "SHARD"}
            connections[name] = StockWrapper({**own, "ENGINE": _STOCK}, name)
        return name

    @contextmanager
    def made(self) -> Iterator[None]:
        """Create global tables, shards and rows; drop them at the end."""
        try:
            self._make_global()
            self._make_shards()
            yield
        finally:
            with self._server() as cursor:
                for schema in self._schemas:
                    cursor.execute(f"DROP DATABASE IF EXISTS `{schema}`")

    @contextmanager
    def _server(self) -> Iterator[Any]:
        with connections["default"]._nodb_cursor() as cursor:
            yield cursor

    def _create(self, cursor: Any, schema: str) -> None:
        self._schemas.append(schema)
        cursor.execute(f"CREATE DATABASE `{schema}`")

    def _make_global(self) -> None:
        from sharded_orm import runtime
        from sharded_orm.contrib.lookups.models import LookupEntry, LookupState
        from sharded_orm.models.tables.key_move import KeyMove
        from sharded_orm.models.tables.placement import Placement
        from sharded_orm.operations.tickets import begin, declared_sequences

        with self._server() as cursor:
            self._create(cursor, f"{self.prefix}_global")
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
        with self._server() as cursor:
            self._create(cursor, template)
            with connections["photos_00000"].schema_editor() as editor:
                editor.create_model(Photo)
            self._fill_template(cursor, template)
            cursor.execute(f"SHOW CREATE TABLE `{template}`.photo")
            definition = cursor.fetchone()[1]
            for schema in schemas:
                self._create(cursor, schema)
                cursor.execute(f"USE `{schema}`")
                cursor.execute(definition)
            for number in range(1, self.shards):
                # Ids are unique over all shards; keys are those of the shard.
                cursor.execute(
                    f"INSERT INTO `{self.prefix}_photos_{number:05d}`.photo"
                    " (photo_id, user_id, title, posted_at, stars)"
                    f" SELECT photo_id + {number * ROWS * USERS}, user_id + {number}, title,"
                    f" posted_at + INTERVAL (photo_id * {number} % 9973) SECOND, stars"
                    f" FROM `{template}`.photo"
                )

    def _fill_template(self, cursor: Any, template: str) -> None:
        rows = [
            (n + 1, (n % USERS) * self.shards, f"Photo number {n}", 1_700_000_000 + n * 60, n % 6)
            for n in range(ROWS * USERS)
        ]
        cursor.executemany(
            f"INSERT INTO `{template}`.photo (photo_id, user_id, title, posted_at, stars)"
            " VALUES (%s, %s, %s, FROM_UNIXTIME(%s), %s)",
            rows,
        )

    def photo(self, number: int) -> tuple[int, int]:
        """Return (user, id) of a photo on shard ``number``."""
        return number, number * ROWS * USERS + 1
