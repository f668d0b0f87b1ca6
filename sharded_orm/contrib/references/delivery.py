"""Brings the copies on shards to the version of the global rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from django.db import DEFAULT_DB_ALIAS, Error, transaction

from sharded_orm.contrib.references.backend import in_transaction
from sharded_orm.contrib.references.declaration import reference_models, shards
from sharded_orm.contrib.references.differences import apply, compare_rows
from sharded_orm.contrib.references.versions import (
    Version,
    changed_since,
    global_version,
    is_before,
    lock,
    removed_ahead,
    set_version,
    versions_on,
)
from sharded_orm.exceptions import ShardedOrmError
from sharded_orm.scatter.failures import is_node_gone
from sharded_orm.topology.model import Shard

logger = logging.getLogger("sharded_orm.references")


@dataclass
class CopyReport:
    """What was brought to the shards.

    :param written: number of copies that were written or removed.
    :param shards: number of shards that were behind.
    :param problems: sentences about shards whose copies stay behind.
    """

    written: int = 0
    shards: int = 0
    problems: list[str] = field(default_factory=list)


def bring_all(
    *,
    anew: Iterable[Any] = (),
    stopping: Callable[[], bool] = lambda: False,
) -> CopyReport:
    """Bring the copies on all shards to the version of the global rows. Not inside of a transaction.

    May be called by many processes at the same time, and again after any interruption. A shard that does
    not answer, and further shards of its node, are left out.

    Costs one query per shard that is up to date.

    :param anew: models whose copies are compared row by row, whatever their versions are.
    """
    report = CopyReport()
    if not reference_models():
        return report
    if in_transaction():
        # Its uncommitted rows would be copied.
        report.problems.append("this thread has an open transaction on the global database")
        return report
    down: set[str] = set()
    version = global_version()
    for shard in shards():
        if stopping():
            break
        if shard.node in down:
            report.problems.append(f"{shard.alias}: the node {shard.node!r} does not answer")
            continue
        try:
            written = bring(shard, version, anew=frozenset(anew))
        except (Error, ShardedOrmError) as exc:
            if is_node_gone(exc):
                down.add(shard.node)
            report.problems.append(f"{shard.alias}: {exc}")
            continue
        if written is not None:
            report.shards += 1
            report.written += written
    return report


def bring(shard: Shard, version: Version, *, anew: Collection[Any] = frozenset()) -> int | None:
    """Bring the copies on one shard to the version of the global rows, in one transaction.

    :param version: a version that the global rows had.
    :returns: the number of copies that were written or removed; None if the shard was up to date.
    """
    alias, models = shard.alias, reference_models()
    # Look without the lock first: it stops the commits of writers.
    if not anew and not behind(alias, models, version):
        return None
    with transaction.atomic(using=DEFAULT_DB_ALIAS):
        version = lock()
        with transaction.atomic(using=alias):
            states = states_on(alias)
            found = []
            for model in models:
                state = states.get(model._meta.label)
                if state is None or not is_before(state, version) or model in anew:
                    # A new shard or model, or the global database was restored from a backup.
                    found.append(compare_rows(model, alias))
                else:
                    changed = {*changed_since(model, state.version), *removed_ahead(model, state)}
                    found.append(compare_rows(model, alias, list(changed)))
            apply(found, alias)
            set_version(alias, [model._meta.label for model in models], version)
    return sum(map(len, found))


def states_on(alias: str) -> dict[str, Any]:
    """Return the versions of the copies on a shard, by the label of the model."""
    return {row.name: row for row in versions_on(alias)}


def behind(alias: str, models: Iterable[Any], version: Version) -> list[Any]:
    """Return those of ``models`` whose copies on a shard are not those of ``version``."""
    states = states_on(alias)
    return [
        model
        for model in models
        if (state := states.get(model._meta.label)) is None
        or (state.history, state.version) != (version.history, version.number)
        or removed_ahead(model, state)
    ]
