"""A transaction in two phases over two servers that flush each commit, beside two plain commits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

from django.apps import apps
from django.db import connections, transaction

import sharded_orm
from sharded_orm import database_settings, runtime
from sharded_orm.contrib import two_phase
from sharded_orm.contrib.two_phase.apps import TwoPhaseConfig
from sharded_orm.topology.aliases import complete
from sharded_orm.topology.model import ShardGroup, ShardRange
from tests.benchmarks.report import Line, at_most
from tests.benchmarks.site import Site
from tests.benchmarks.timing import Rounds, compare
from tests.services import mariadb

GROUP, ALIASES = "pairs", ("pairs_00000", "pairs_00001")
CALLS = 40
LIMIT = 3.0


def two_phase_commit(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Update a row on each of two servers."""
    durable = {"innodb_flush_log_at_trx_commit": "1", "innodb_doublewrite": "1"}
    values = count()

    def update(alias: str) -> None:
        with connections[alias].cursor() as cursor:
            cursor.execute("UPDATE item SET value = %s WHERE id = 1", [next(values)])

    def ours() -> None:
        with sharded_orm.atomic(GROUP, two_phase=True):
            for alias in ALIASES:
                update(alias)

    def plain() -> None:
        with transaction.atomic(using=ALIASES[0]):
            update(ALIASES[0])
        with transaction.atomic(using=ALIASES[1]):
            update(ALIASES[1])

    with mariadb.servers(2, **durable) as servers, _group_on(servers):
        yield at_most(
            LIMIT,
            "atomic(two_phase=True) with an update on each of two servers",
            "two plain transactions",
            compare(ours, plain, rounds, number=CALLS),
        )


@contextmanager
def _group_on(servers: list[mariadb.MariaDBServer]) -> Iterator[None]:
    """A group with a shard on each server, and the app with the table of decisions."""
    from sharded_orm.contrib.two_phase.models import Decision

    before = runtime.topology()
    nodes = {
        name: {"ENGINE": "sharded_orm.backends.mysql", **server.address.django()}
        for name, server in zip(("pair_1", "pair_2"), servers, strict=True)
    }
    ranges = (ShardRange(0, 0, "pair_1"), ShardRange(1, 1, "pair_2"))
    group = ShardGroup(GROUP, ranges, "modulo")
    runtime.swap(
        replace(before, nodes={**before.nodes, **nodes}, groups={**before.groups, GROUP: group})
    )
    config = TwoPhaseConfig(TwoPhaseConfig.name, two_phase)
    config.apps, config.models = apps, apps.all_models[config.label]
    apps.app_configs[config.label] = config
    connections.settings[GROUP] = complete(database_settings.group_settings(group))
    try:
        for alias in ALIASES:
            wrapper: Any = connections[alias]
            wrapper.create_shard_database()
            with wrapper.cursor() as cursor:
                cursor.execute("CREATE TABLE item (id integer PRIMARY KEY, value integer)")
                cursor.execute("INSERT INTO item VALUES (1, 0)")
            with wrapper.schema_editor() as editor:
                editor.create_model(Decision)
        yield
    finally:
        connections[GROUP].close()
        del connections[GROUP], connections.settings[GROUP]
        del apps.app_configs[config.label]
        runtime.swap(before)
