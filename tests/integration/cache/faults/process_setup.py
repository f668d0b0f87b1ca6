"""Settings and tables of the processes of these tests, which all import this module.

Imports no model: a process configures Django first.
"""

from __future__ import annotations

import functools
import logging
import random
from dataclasses import dataclass
from typing import Any

from tests.integration.cache.faults.databases import FaultDatabase, database_at
from tests.patience import PATIENCE
from tests.python_process import CONTEXT
from tests.services.addresses import ServerAddress
from tests.services.keeper import die_with_parent

GROUP, SHARDS = "chaos", 2
GLOBAL_SCHEMA = "chaos_global"
#: Owners of rows: 0 owns the global rows, any other number is a user and a shard key.
OWNERS = range(6)
#: The rows of an owner are in lanes. Transactions on one lane run one after the other, those on
#: different lanes at the same time.
LANES = (0, 1)
#: A lane whose rows are written one at a time, in autocommit.
SOLO = 2
ALL_LANES = (*LANES, SOLO)
ALBUMS = (1, 2)
#: Numbers of the rows of a lane.
SLOTS = range(6)
ITEMS = {
    (owner, lane): tuple(owner * 100 + slot * len(ALL_LANES) + lane for slot in SLOTS)
    for owner in OWNERS
    for lane in ALL_LANES
}


def schema_of(owner: int) -> str:
    return f"{GROUP}_{owner % SHARDS:05d}" if owner else GLOBAL_SCHEMA


@dataclass(frozen=True)
class ProcessSetup:
    """The settings of a process.

    :param address: address for readers, and for the checker, which reads without the library.
    :param writers: address for writers, which have an account of their own.
    :param caches: entries of ``CACHES``.
    :param cache: ``SHARDED_ORM["CACHE"]``.
    :param ablation: name of the part that is missing from the protocol; see ``ablations``.
    """

    address: ServerAddress
    writers: ServerAddress
    caches: dict[str, dict[str, Any]]
    cache: dict[str, Any]
    ablation: str | None = None

    def begin(self, *, writes: bool) -> None:
        """Prepare the process; called first."""
        die_with_parent()
        self._configure(database_at(self.writers if writes else self.address))
        from tests.integration.cache.faults import ablations, failpoints

        # The points stay outside of the code that an ablation replaces.
        ablations.apply(self.ablation)
        failpoints.install(*database_at(self.address).commits())

    def _configure(self, database: FaultDatabase) -> None:
        import django
        from django.conf import settings

        from sharded_orm.topology.aliases import sharded_databases

        settings.configure(
            INSTALLED_APPS=[
                "django.contrib.contenttypes",
                "sharded_orm",
                "tests.integration.cache.faults",
            ],
            DATABASES=sharded_databases({"default": database.global_alias(GLOBAL_SCHEMA)}),
            DATABASE_ROUTERS=["sharded_orm.routers.ShardRouter"],
            DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
            CACHES={
                "default": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"},
                **self.caches,
            },
            SHARDED_ORM={
                "NODES": {"node": database.node()},
                "GROUPS": {
                    GROUP: {
                        "STRATEGY": "modulo",
                        "RANGES": [{"range": (0, SHARDS - 1), "primary": "node"}],
                    }
                },
                **({"CACHE": self.cache} if self.cache else {}),
            },
            LOGGING_CONFIG=None,
            USE_TZ=True,
        )
        # Counters report what goes wrong in these processes.
        logging.getLogger("sharded_orm").addHandler(logging.NullHandler())
        logging.getLogger("sharded_orm").propagate = False
        django.setup()


TABLES = """
CREATE TABLE truth (
    owner BIGINT, lane INT, epoch BIGINT NOT NULL, state TEXT NOT NULL, PRIMARY KEY (owner, lane))
;
CREATE TABLE history (
    owner BIGINT, lane INT, epoch BIGINT, state TEXT NOT NULL, PRIMARY KEY (owner, lane, epoch))
"""


def create_tables(setup: ProcessSetup) -> None:
    """Create all schemas, tables and the first rows, in a process of its own."""
    process = CONTEXT.Process(target=_create_tables, args=(setup,), daemon=True)
    process.start()
    process.join(PATIENCE)
    exitcode = process.exitcode
    process.kill()
    assert exitcode == 0, "tables could not be created"


def _create_tables(setup: ProcessSetup) -> None:
    setup.begin(writes=False)
    from tests.integration.cache.faults.rows import Owner, transact

    for owner in map(Owner, OWNERS):
        if owner.number <= SHARDS:  # the first owner of its database
            _create_schema(owner, database_at(setup.address))
        dice = random.Random(owner.number)
        for lane in LANES:
            transact((owner,), (lane,), functools.partial(owner.create_many, lane, dice))
        owner.write_in_autocommit(dice)


def _create_schema(owner: Any, database: FaultDatabase) -> None:
    from django.db import connections

    connection, model = connections[owner.alias], owner.model
    schema = schema_of(owner.number)
    if owner.number:
        connection.create_shard_database()
    with connection.schema_editor() as editor:
        editor.create_model(model)
    with connection.cursor() as cursor:
        for statement in TABLES.split(";"):
            cursor.execute(statement)
        key = "{row}.user_id" if owner.number else "0"
        mine = f"user_id = {key} AND " if owner.number else ""
        for statement in database.solo_triggers(model._meta.db_table, SOLO, key, mine):
            cursor.execute(statement)
        for number in OWNERS:
            for lane in ALL_LANES if schema_of(number) == schema else ():
                for table in ("truth", "history"):
                    cursor.execute(f"INSERT INTO {table} VALUES (%s, %s, 0, '[]')", (number, lane))
