"""Ends prepared branches whose coordinator has died, or has lost its connection.

The rule is *presumed abort*: without a stored decision, a transaction is aborted. Before a branch is
rolled back, the decider must therefore show that no decision can follow (``fate_of``). So any number of
processes may recover at the same time, beside coordinators that are alive.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.apps import apps
from django.db import Error, connections

from sharded_orm import runtime
from sharded_orm.backends.two_phase.branch import TABLE, BranchName, Completion, Fate
from sharded_orm.exceptions import BranchesPrepared, CacheUnavailable, ShardedOrmError
from sharded_orm.models.cached.cached_model import cached_model
from sharded_orm.models.cached.invalidation import void_tables
from sharded_orm.topology.model import Shard, ShardGroup
from sharded_orm.two_phase.app import is_enabled, refusal_of

logger = logging.getLogger("sharded_orm.two_phase")

#: Seconds for which a branch must have been prepared before a recovery cares for it. A coordinator that
#: is alive needs milliseconds.
GRACE: Final = 2.0
#: Decisions without a branch are deleted after so many seconds.
KEPT_FOR: Final = 3600
_POLL = 0.1  # seconds
# Decisions of one shard that are deleted at once, and in all by one call.
_BATCH = 500
_MOST_ROWS = 50_000


@dataclass(frozen=True, order=True)
class PreparedBranch:
    """A prepared branch of this site, and the shard that it is on."""

    branch: BranchName
    alias: str
    node: str

    def __str__(self) -> str:
        return f"{self.branch.transaction!r} on {self.alias!r} (node {self.node!r})"


@dataclass(frozen=True)
class Recovered:
    """What a recovery did with one branch.

    :param outcome: "committed", "rolled back", "had ended already", or why it is not ended.
    :param is_over: whether the branch is ended.
    """

    prepared: PreparedBranch
    outcome: str
    is_over: bool

    def __str__(self) -> str:
        return f"{self.prepared}: {self.outcome}"


def prepared_on(node: str, group: ShardGroup) -> list[PreparedBranch]:
    """Return the branches that are prepared on the shards that ``group`` has on ``node``. One query.

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
    """Return the connection object of a shard that ``group`` has on ``node``."""
    first = next(holder.first for holder in group.ranges if holder.primary == node)
    return _wrapper(group.shard(first).alias)


def recover(
    group: ShardGroup,
    shards: Iterable[Shard] | None = None,
    *,
    grace: float = GRACE,
    failures: dict[str, Error] | None = None,
) -> list[Recovered]:
    """End the branches that have been prepared for ``grace`` seconds. Return all of these.

    :param shards: only branches on these shards of ``group``. Default: all shards.
    :param failures: gets the error of each node that does not answer, by the node's name.
    :raises django.db.Error: a node of the shards does not answer, and ``failures`` is None.

    One query per node if nothing is prepared. Must not be called in a transaction of the group.
    """
    shards = None if shards is None else list(shards)
    before = _prepared(group, shards, failures)
    deadline = time.monotonic() + grace
    while before and time.monotonic() < deadline:
        time.sleep(_POLL)  # No server tells when a branch ends.
        before &= _prepared(group, shards, failures)
    return [end(prepared) for prepared in sorted(before)]


def left_on(group: ShardGroup, shards: Iterable[Shard]) -> list[str]:
    """Recover, and return a line for each branch that is left on ``shards``.

    For operations that change tables, or move rows: a prepared branch holds locks, and may still
    commit. Does nothing if the site has no blocks in two phases.

    :raises django.db.Error: a node of the shards does not answer.
    """
    if not is_enabled() or refusal_of(group.name):
        return []
    return [str(result) for result in recover(group, shards) if not result.is_over]


def refuse_prepared(group: ShardGroup, shards: Iterable[Shard]) -> None:
    """Raise an error if :func:`left_on` returns any branch.

    :raises BranchesPrepared: a branch is left. The error names all.
    """
    if left := left_on(group, shards):
        raise BranchesPrepared(left)


def end(prepared: PreparedBranch, *, seconds: float = 1.0) -> Recovered:
    """End one prepared branch as its transaction was decided, if that is certain.

    :param seconds: how long to wait for the end of the transaction that may store the decision.
    """
    try:
        outcome, is_over = _end(prepared, seconds)
    except (Error, ShardedOrmError) as exc:
        outcome, is_over = f"left, because a server does not answer: {exc}", False
    logger.log(logging.WARNING if is_over else logging.INFO, "Branch %s: %s", prepared, outcome)
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
        # A cache that does not answer is noticed before anything is committed.
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
    """Delete old decisions that no branch needs. Return how many.

    :param shards: only decisions on these shards of ``group``. Default: all shards.

    Costs one statement per shard, and another one if the shard has old decisions.

    :raises django.db.Error: a node does not answer. It may have a branch that needs its decision.
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
    # The decisions were committed, so their branches were prepared before. Those that are not ended
    # are found now, whatever the clocks of the processes say.
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
    """Run a statement in autocommit, and keep no connection object for it. Return its first rows."""
    wrapper = _wrapper(alias)
    with wrapper.cursor() as cursor:
        cursor.execute(sql, params)
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
    """Make void what the cache has of the rows on ``alias``, because any of them may have changed."""
    if runtime.config().cache is None:
        return
    models = (cached_model(model) for model in apps.get_models())
    void_tables(
        [cached for cached in models if cached is not None and cached.caches_alias(alias)], alias
    )


def _wrapper(alias: str) -> Any:
    return connections[alias]
