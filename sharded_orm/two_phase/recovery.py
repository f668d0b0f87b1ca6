"""Recovery: ends prepared branches whose coordinator has died or has lost its connection.

A *branch* is the part of a transaction on one shard. A *prepared* branch holds its locks until it
is committed or rolled back, even if its session or server ends. The *coordinator* is the object
that runs the commit in two phases. It stores the decision to commit on one shard of the
transaction, the *decider*.

Without a stored decision, the transaction is rolled back (*presumed abort*). Before a recovery
rolls back a branch for this reason, it makes sure at the decider that no decision can be stored
later (``fate_of``). This allows any number of recoveries to run at the same time, even while
coordinators work.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.apps import apps
from django.db import DatabaseError, Error, connections

from sharded_orm import runtime
from sharded_orm.backends.two_phase.branch import (
    TABLE,
    BranchName,
    Completion,
    Fate,
    note_missing_table,
)
from sharded_orm.exceptions import BranchesPrepared, CacheUnavailable, ShardedOrmError
from sharded_orm.models.cached.cached_model import cached_model
from sharded_orm.models.cached.model_cache import void_tables
from sharded_orm.topology.model import Shard, ShardGroup
from sharded_orm.two_phase.app import is_enabled, refusal_of

logger = logging.getLogger("sharded_orm.two_phase")

#: A branch is the part on one shard of a transaction in two phases. A recovery ends only branches
#: that have been prepared for at least this many seconds. The process that has prepared a branch
#: ends it within milliseconds, if the process is alive.
GRACE: Final = 2.0
#: A stored decision to commit a transaction is deleted after this many seconds, if no part of the
#: transaction is still waiting to be committed.
KEPT_FOR: Final = 3600
_POLL = 0.1  # seconds

# _BATCH is the largest number of decisions that one statement deletes. _MOST_ROWS is the largest
# number that one call of forget_decisions() deletes on each shard.
_BATCH = 500
_MOST_ROWS = 50_000


@dataclass(frozen=True, order=True)
class PreparedBranch:
    """A prepared branch of this site: the part on one shard of a transaction in two phases.

    ``alias`` is the alias of the shard, and ``node`` is the node of the shard.
    """

    branch: BranchName
    alias: str
    node: str

    def __str__(self) -> str:
        return f"{self.branch.transaction!r} on {self.alias!r} (node {self.node!r})"


@dataclass(frozen=True)
class Recovered:
    """The result of a recovery for one branch, the part on one shard of a transaction.

    :param outcome: "committed", "rolled back", "had ended already", or the reason why the branch is
        still prepared.
    :param is_over: whether the branch is no longer prepared.
    """

    prepared: PreparedBranch
    outcome: str
    is_over: bool

    def __str__(self) -> str:
        return f"{self.prepared}: {self.outcome}"


def prepared_on(node: str, group: ShardGroup) -> list[PreparedBranch]:
    """Return the branches that are prepared on those shards of ``group`` that are on ``node``.

    A prepared branch is the part on one shard of a transaction in two phases. Costs one query.

    :raises django.db.Error: the node does not answer.
    """
    ranges = [holder for holder in group.ranges if holder.primary == node]
    if not ranges:
        return []
    branches: list[BranchName] = any_on(node, group).prepared_branches()
    if not branches:
        return []
    here = {
        group.schema_name(number): group.shard(number).alias
        for holder in ranges
        for number in range(holder.first, holder.last + 1)
    }
    return [
        PreparedBranch(branch, here[branch.schema], node)
        for branch in branches
        if branch.schema in here
    ]


def any_on(node: str, group: ShardGroup) -> Any:
    """Return the connection object of one of those shards of ``group`` that are on ``node``."""
    first = next(holder.first for holder in group.ranges if holder.primary == node)
    return _wrapper(group.shard(first).alias)


def recover(
    group: ShardGroup,
    shards: Iterable[Shard] | None = None,
    *,
    grace: float = GRACE,
    failures: dict[str, Error] | None = None,
    logs: bool = True,
) -> list[Recovered]:
    """End the branches of ``group`` that stay prepared for ``grace`` seconds, and return the
    results.

    A prepared branch is the part on one shard of a transaction in two phases. If a branch is
    prepared, this function waits for ``grace`` seconds, because the process that has prepared the
    branch probably ends it within this time. If no branch is prepared, costs one query per node.
    Must not be called in a transaction of the group.

    :param shards: only branches on these shards of ``group`` are ended. Default: those on all
        shards.
    :param grace: seconds for which a branch must stay prepared before it is ended.
    :param failures: a dict to which the error of each node that does not answer is added, keyed by
        the node's name.
    :param logs: whether to log each result. False if the caller shows the results.
    :raises django.db.Error: a node of the shards does not answer, and ``failures`` is None.
    """
    shards = None if shards is None else list(shards)
    before = _prepared(group, shards, failures)
    deadline = time.monotonic() + grace
    while before and time.monotonic() < deadline:
        # Poll, because servers do not notify anybody when a branch ends.
        time.sleep(_POLL)
        before &= _prepared(group, shards, failures)
    return [end(prepared, logs=logs) for prepared in sorted(before)]


def left_on(group: ShardGroup, shards: Iterable[Shard]) -> list[str]:
    """End prepared branches on ``shards``. Return a line of text for each that cannot be ended.

    Operations that change tables or move rows call this first: a prepared branch (the part on one
    shard of a transaction in two phases) holds locks and may still commit. Does nothing if the
    group does not commit in two phases.

    :raises django.db.Error: a node of the shards does not answer.
    """
    if not is_enabled() or refusal_of(group.name):
        return []
    return [str(result) for result in recover(group, shards) if not result.is_over]


def refuse_prepared(group: ShardGroup, shards: Iterable[Shard]) -> None:
    """End prepared branches on ``shards`` (:func:`left_on`), and raise an error if one cannot be ended.

    :raises BranchesPrepared: branches are left. The error lists all of them.
    """
    if left := left_on(group, shards):
        raise BranchesPrepared(left)


def end(prepared: PreparedBranch, *, seconds: float = 1.0, logs: bool = True) -> Recovered:
    """End one prepared branch: commit it or roll it back, as the deciding shard has decided.

    A branch is the part on one shard of a transaction in two phases. The deciding shard is the one
    that stores the decision to commit the transaction. The branch is left prepared if the decision
    is not certain yet, or if a server does not answer. No database error is raised.

    :param seconds: how long to wait if the deciding shard has an open transaction that may still
        store the decision.
    :param logs: whether to log the result.
    """
    try:
        outcome, is_over = _end(prepared, seconds)
    except (Error, ShardedOrmError) as exc:
        outcome, is_over = f"left, because a server does not answer: {exc}", False
    if logs:
        level = logging.WARNING if is_over else logging.INFO
        logger.log(level, "Branch %s: %s", prepared, outcome)
    return Recovered(prepared, outcome, is_over)


def _end(prepared: PreparedBranch, seconds: float) -> tuple[str, bool]:
    branch = prepared.branch
    decider = runtime.topology().resolve(branch.decider)
    if decider is None:
        return f"left, because the topology has no shard {branch.decider!r}, which decides", False
    fate = _wrapper(decider.alias).fate_of(branch.transaction, seconds)
    if fate is Fate.OPEN:
        return f"left, because its transaction on {decider.alias!r} is still open", False
    if fate is Fate.COMMITTED:
        # The branch is about to be committed, so its rows change. Make the cache entries void
        # before the commit, and once more after it. If a cache server does not answer now, this
        # call raises an error, and nothing is committed.
        _void_cache(prepared.alias)
    completion = _wrapper(prepared.alias).end_branch(branch, commit=fate is Fate.COMMITTED)
    if completion is Completion.HELD:
        return "left, because the session that prepared it is still connected", False
    if fate is Fate.COMMITTED:
        try:
            _void_cache(prepared.alias)
        except CacheUnavailable as exc:
            logger.error("Run 'manage.py cache_invalidate' for the models of the group: %s", exc)
    if completion is Completion.GONE:
        return "had ended already", True
    return "committed" if fate is Fate.COMMITTED else "rolled back", True


def forget_decisions(group: ShardGroup, shards: Iterable[Shard] | None = None) -> int:
    """Delete old decisions that no branch needs, and return the number of deleted decisions.

    A decision is the stored row that says that a transaction in two phases is committed. A branch
    (the part of the transaction on one shard) needs it until the branch is committed.

    Costs one statement per shard, and further statements if the shard has old decisions.

    :param shards: only decisions on these shards of ``group`` are deleted. Default: those on all
        shards.
    :raises django.db.Error: a node does not answer. A branch on that node may need a decision, so
        no decision is deleted before all nodes have answered.
    """
    limit = int(time.time()) - KEPT_FOR
    old: dict[str, list[str]] = {}
    for shard in group.shards() if shards is None else shards:
        rows = _rows(
            shard.alias, f"SELECT name FROM {TABLE} WHERE decided_at < %s", [limit], _MOST_ROWS
        )
        if rows:
            old[shard.alias] = [str(name) for (name,) in rows]
    if not old:
        return 0
    # Read the prepared branches after the decisions, and not before. When a decision in ``old`` was
    # committed, all its branches were prepared. So this query finds each of these branches that is
    # still prepared and needs the decision, even if the clocks of the hosts differ.
    needed = {prepared.branch.transaction for prepared in _prepared(group, None, None)}
    count = 0
    for alias, names in old.items():
        unneeded = [name for name in names if name not in needed]
        for start in range(0, len(unneeded), _BATCH):
            batch = unneeded[start : start + _BATCH]
            marks = ", ".join(["%s"] * len(batch))
            _rows(alias, f"DELETE FROM {TABLE} WHERE name IN ({marks})", batch)
            count += len(batch)
    return count


def _rows(alias: str, sql: str, params: Sequence[Any], most: int = 0) -> Sequence[Any]:
    """Run a statement on ``alias`` in autocommit mode, and return its rows.

    The connection object is dropped afterwards, so that calls for many shards do not keep one
    object for each shard.

    :param most: the maximum number of rows to return; 0 for a statement without rows.
    """
    wrapper = _wrapper(alias)
    with wrapper.cursor() as cursor:
        try:
            cursor.execute(sql, params)
        except DatabaseError as exc:
            note_missing_table(exc, alias)
            raise
        rows: Sequence[Any] = cursor.fetchmany(most) if most else ()
    wrapper.close_and_forget()
    return rows


def _prepared(
    group: ShardGroup, shards: Sequence[Shard] | None, failures: dict[str, Error] | None
) -> set[PreparedBranch]:
    if shards is None:
        nodes, aliases = {holder.primary for holder in group.ranges}, None
    else:
        nodes, aliases = {shard.node for shard in shards}, {shard.alias for shard in shards}
    found: set[PreparedBranch] = set()
    for node in sorted(nodes):
        try:
            found.update(prepared_on(node, group))
        except Error as exc:
            if failures is None:
                raise
            failures[node] = exc
    return found if aliases is None else {p for p in found if p.alias in aliases}


def _void_cache(alias: str) -> None:
    """Make all cache entries of rows on ``alias`` void, because any of these rows may have changed."""
    if runtime.config().cache is None:
        return
    models = (cached_model(model) for model in apps.get_models())
    void_tables(
        [cached for cached in models if cached is not None and cached.caches_alias(alias)], alias
    )


def _wrapper(alias: str) -> Any:
    return connections[alias]
