"""Updates the copies of reference tables on shards from the rows in the global database."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from django.db import DEFAULT_DB_ALIAS, Error, connections, transaction
from django.db.models import F

from sharded_orm.contrib.references.backend import in_transaction
from sharded_orm.contrib.references.declaration import columns_digest, reference_models, shards
from sharded_orm.contrib.references.differences import apply, compare_rows
from sharded_orm.contrib.references.models import TableVersion
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
# A delivery waits at most this number of seconds for locks on a shard. Meanwhile it holds the lock
# of the reference tables, so the commits of their writers wait as well. On MariaDB and MySQL, the
# setting is innodb_lock_wait_timeout; on SQLite, the option timeout.
_PATIENCE = 2.0


@dataclass
class CopyReport:
    """The outcome of an update of the copies on shards.

    :param written: number of copies that were written or removed.
    :param shards: number of shards whose copies were out of date.
    :param problems: sentences about shards whose copies could not be updated.
    """

    written: int = 0
    shards: int = 0
    problems: list[str] = field(default_factory=list)


def bring_all(
    *,
    anew: Iterable[Any] = (),
    stopping: Callable[[], bool] = lambda: False,
) -> CopyReport:
    """Update the copies on all shards, so that they equal the rows of the reference tables.

    Must be called outside of a transaction. May be called by many processes at the same time, and
    again after any interruption. If a shard does not answer, it is left out; if its node (a
    database server) is down, so are the other shards of the node.

    Costs one query per shard that is up to date.

    :param anew: models whose copies are compared row by row, even if they seem to be up to date.
    :param stopping: called before each shard; if it returns True, the call ends.
    """
    report, models = CopyReport(), reference_models()
    if not models:
        return report
    if in_transaction():
        # The copies would include rows of the open transaction, which may be rolled back.
        report.problems.append("this thread has an open transaction on the global database")
        return report
    down, compared = set[str](), frozenset(anew)
    version = global_version()
    for shard in shards():
        if stopping():
            break
        if shard.node in down:
            report.problems.append(f"{shard.alias}: the node {shard.node!r} does not answer")
            continue
        try:
            written = bring(shard, models, version, anew=compared)
        except (Error, ShardedOrmError) as exc:
            if is_node_gone(exc):
                down.add(shard.node)
            report.problems.append(f"{shard.alias}: {exc}")
            continue
        if written is not None:
            report.shards += 1
            report.written += written
    return report


def bring(
    shard: Shard, models: Sequence[Any], version: Version, *, anew: Collection[Any] = frozenset()
) -> int | None:
    """Update the copies on one shard, so that they equal the rows of the reference tables.

    All changes are made in one transaction of the shard.

    :param models: all reference models, in the order of :func:`~.declaration.reference_models`.
    :param version: the version of the reference tables that the caller has read.
    :param anew: models whose copies are compared row by row, even if they seem to be up to date.
    :returns: the number of copies that were written or removed; None if the shard was up to date.
    """
    alias = shard.alias
    # Compare the versions without the lock first. The lock makes the commits of writers wait, so it
    # is taken only if copies seem to be outdated.
    if not anew and not behind(alias, models, version):
        return None
    with transaction.atomic(using=DEFAULT_DB_ALIAS):
        version = lock()
        with transaction.atomic(using=alias):
            states = lock_states(alias)
            found = []
            for model in models:
                state = states.get(model._meta.label)
                if model in anew or not may_be_continued(state, model, version):
                    found.append(compare_rows(model, alias))
                else:
                    changed = {*changed_since(model, state.version), *removed_ahead(model, state)}
                    found.append(compare_rows(model, alias, list(changed)))
            apply(found, alias)
            set_version(alias, {m._meta.label: columns_digest(m) for m in models}, version)
    return sum(map(len, found))


def states_on(alias: str) -> dict[str, Any]:
    """Return a dict that maps labels of models to their rows of ``TableVersion`` on a shard."""
    return {row.name: row for row in versions_on(alias)}


def lock_states(alias: str) -> dict[str, Any]:
    """Lock the versions of the copies on a shard until the end of its transaction, and return them.

    This keeps a process from writing older copies over newer ones. The caller holds the lock of the
    reference tables in the global database. If it loses its connection to this database, it loses
    the lock as well. Then another process gets the lock, and calls this function, too: it waits
    here until the first process's transaction on the shard has ended. Callers read the rows in the
    global database only after this call, so the newer copies are written last.

    :raises django.db.OperationalError: other transactions hold locks on these rows. All later
        statements of the transaction may raise the error as well.
    """
    connection: Any = connections[alias]
    connection.limit_lock_waits(_PATIENCE)
    versions_on(alias).update(version=F("version"))
    return states_on(alias)


def may_be_continued(
    state: TableVersion | None, model: Any, version: Version
) -> TypeGuard[TableVersion]:
    """Return whether it is enough to copy the rows that were changed after the version ``state``.

    If it returns False, all rows have to be compared. For example, the shard, the model or a column
    is new, or the global database was restored from a backup.

    :param state: the version of the model's copies, as stored on their shard; None if it has none.
    """
    return (
        state is not None and state.columns == columns_digest(model) and is_before(state, version)
    )


def behind(alias: str, models: Iterable[Any], version: Version) -> list[Any]:
    """Return those of ``models`` whose copies on the shard ``alias`` must be updated.

    Usually these are the models whose copies have an older version than ``version``. A model is
    also returned in three other cases: the shard has no copies of it yet; its copies were made by
    code with other columns; or copies were deleted because their rows in the global database were
    about to be deleted. In the last case, a row may have been kept, and its copy must be restored.
    """
    states = states_on(alias)
    return [
        model
        for model in models
        if (state := states.get(model._meta.label)) is None
        or (state.history, state.version) != (version.history, version.number)
        or state.columns != columns_digest(model)
        or removed_ahead(model, state)
    ]
