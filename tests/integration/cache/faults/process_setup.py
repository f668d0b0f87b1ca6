"""Settings and tables of the processes of these tests, which all import this module.

Imports no model: a process configures Django first.
"""

from __future__ import annotations

import functools
import logging
import random
from dataclasses import dataclass
from typing import Any

from tests.patience import PATIENCE
from tests.python_process import CONTEXT
from tests.services.keeper import die_with_parent
from tests.services.mariadb import Address

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

    :param mariadb: address for readers, and for the checker, which reads without the library.
    :param writers: address for writers, which have an account of their own.
    :param caches: entries of ``CACHES``.
    :param cache: ``SHARDED_ORM["CACHE"]``.
    :param ablation: name of the part that is missing from the protocol; see ``ablations``.
    """

    mariadb: Address
    writers: Address
    caches: dict[str, dict[str, Any]]
    cache: dict[str, Any]
    ablation: str | None = None

    def begin(self, *, writes: bool) -> None:
        """Prepare the process; called first."""
        die_with_parent()
        self._configure(self.writers if writes else self.mariadb)
        from tests.integration.cache.faults import ablations, failpoints

        # The points stay outside of the code that an ablation replaces.
        ablations.apply(self.ablation)
        failpoints.install()

    def _configure(self, address: Address) -> None:
        import django
        from django.conf import settings

        from sharded_orm.topology.aliases import sharded_databases

        engine = {
            "ENGINE": "sharded_orm.backends.mysql",
            "OPTIONS": {"charset": "utf8mb4", "isolation_level": "read committed"},
            **address.django(),
        }
        settings.configure(
            INSTALLED_APPS=[
                "django.contrib.contenttypes",
                "sharded_orm",
                "tests.integration.cache.faults",
            ],
            DATABASES=sharded_databases({"default": {**engine, "NAME": GLOBAL_SCHEMA}}),
            DATABASE_ROUTERS=["sharded_orm.routers.ShardRouter"],
            DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
            CACHES={
                "default": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"},
                **self.caches,
            },
            SHARDED_ORM={
                "NODES": {"node": engine},
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

# Records the writes of a writer that does not use transact(). It reads the rows under lock: an
# earlier snapshot would lack the rows that another writer commits while this one waits.
SOLO_TRIGGER = """
CREATE TRIGGER solo_{event} AFTER {event} ON {table} FOR EACH ROW
IF {row}.lane = {solo} THEN
    UPDATE truth SET epoch = epoch + 1 WHERE owner = {owner} AND lane = {solo};
    SELECT CONCAT('[', COALESCE(GROUP_CONCAT(
            JSON_ARRAY(item_id, album_id, shown, stamp) ORDER BY item_id SEPARATOR ','), ''), ']')
        INTO @state FROM {table} WHERE {mine}lane = {solo} LOCK IN SHARE MODE;
    UPDATE truth SET state = @state WHERE owner = {owner} AND lane = {solo};
    INSERT INTO history SELECT owner, lane, epoch, state FROM truth
        WHERE owner = {owner} AND lane = {solo};
END IF
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
            _create_schema(owner)
        dice = random.Random(owner.number)
        for lane in LANES:
            transact((owner,), (lane,), functools.partial(owner.create_many, lane, dice))
        owner.write_in_autocommit(dice)


def _create_schema(owner: Any) -> None:
    from django.db import connections

    connection, model = connections[owner.alias], owner.model
    schema = connection.settings_dict["NAME"]
    connection.creation.create_schema(schema, if_not_exists=True)
    with connection.schema_editor() as editor:
        editor.create_model(model)
    with connection.cursor() as cursor:
        for statement in TABLES.split(";"):
            cursor.execute(statement)
        for event, row in (("INSERT", "NEW"), ("UPDATE", "NEW"), ("DELETE", "OLD")):
            key = f"{row}.user_id" if owner.number else "0"
            cursor.execute(
                SOLO_TRIGGER.format(
                    event=event, row=row, table=model._meta.db_table, solo=SOLO, owner=key,
                    mine=f"user_id = {key} AND " if owner.number else "",
                )
            )  # fmt: skip
        for number in OWNERS:
            for lane in ALL_LANES if schema_of(number) == schema else ():
                for table in ("truth", "history"):
                    cursor.execute(f"INSERT INTO {table} VALUES (%s, %s, 0, '[]')", (number, lane))
