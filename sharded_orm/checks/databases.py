"""System checks that ask databases: they run with ``check --database`` and ``migrate``.

Ids are permanent, and numbered with those of ``sharded_orm.checks.models``.

==================  ==========================================================
``sharded_orm.W025``  a ticket server lacks sequences that models draw from
``sharded_orm.E050``  a shard's column takes two keys for one
==================  ==========================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core import checks
from django.db import connections
from django.db.migrations.executor import MigrationExecutor

from sharded_orm import runtime
from sharded_orm.operations.shards import collations
from sharded_orm.operations.tickets import missing_sequences


@checks.register(checks.Tags.database)
def check_sequences(
    databases: Sequence[str] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Check that the ticket servers among ``databases`` have the sequences of all models."""
    return [
        checks.Warning(
            f"Ticket server {server.alias!r} has no sequence {', '.join(map(repr, names))}.",
            hint="Run 'manage.py tickets create', which makes all that models draw from.",
            id="sharded_orm.W025",
        )
        for server in (runtime.tickets().servers if databases else ())
        if server.alias in (databases or ()) and (names := missing_sequences(server))
    ]


@checks.register(checks.Tags.database)
def check_text_keys(
    databases: Sequence[str] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Check that the shards among ``databases``, or of groups among them, tell keys apart."""
    found: list[checks.CheckMessage] = []
    topology = runtime.topology() if databases else None
    for alias in databases or ():
        assert topology is not None
        group, shard = topology.groups.get(alias), topology.resolve(alias)
        if group is not None:
            shards = list(group.shards())
        elif shard is not None:
            shards = [shard]
        else:
            continue
        for column in collations.read(shards):
            # migrate checks first, and must be able to mend it.
            mending = shard is not None and _is_behind(alias)
            found.append(
                (checks.Warning if mending else checks.Error)(
                    column.problem,
                    hint=column.remedy,
                    obj=column.key.field,
                    id="sharded_orm.E050",
                )
            )
    return found


def _is_behind(alias: str) -> bool:
    """Whether migrations are still to be applied."""
    executor = MigrationExecutor(connections[alias])
    return bool(executor.migration_plan(executor.loader.graph.leaf_nodes()))
