"""System checks that query databases: they run with ``check --database`` and ``migrate``.

The ids of the checks never change. All modules of ``sharded_orm.checks`` share one range of numbers.

==================  ==========================================================
``sharded_orm.W025``  a ticket server lacks sequences that models take ids from
``sharded_orm.E050``  a text key has a collation that treats different keys as equal
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
    """Warn if ticket servers lack sequences from which models take ids.

    Queries each ticket server whose alias is in ``databases``.
    """
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
    """Report text keys whose column treats different keys, such as "a" and "A", as equal.

    Queries the shards whose aliases are in ``databases``. The alias of a shard group stands for all
    shards of the group.
    """
    messages: list[checks.CheckMessage] = []
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
            # Report only a warning if a pending migration may repair the column: ``migrate`` runs
            # the checks first, and an error would stop ``migrate`` before the repair.
            repairable = shard is not None and _is_behind(alias)
            messages.append(
                (checks.Warning if repairable else checks.Error)(
                    column.problem,
                    hint=column.remedy,
                    obj=column.key.field,
                    id="sharded_orm.E050",
                )
            )
    return messages


def _is_behind(alias: str) -> bool:
    """Whether the database ``alias`` has unapplied migrations."""
    executor = MigrationExecutor(connections[alias])
    return bool(executor.migration_plan(executor.loader.graph.leaf_nodes()))
