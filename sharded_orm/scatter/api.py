"""What the queryset calls: fetch, count, exists and aggregate over many shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.models import Count

from sharded_orm.scatter import aggregates as aggregation
from sharded_orm.scatter import two_phase
from sharded_orm.scatter.compile import CompileOptions
from sharded_orm.scatter.execute import Executor
from sharded_orm.scatter.failures import Failures
from sharded_orm.scatter.merge import cut, merged
from sharded_orm.scatter.plan import STREAM_BATCH, ScatterPlan, Target, make_plan
from sharded_orm.scatter.refusals import check
from sharded_orm.scatter.rows import objects

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.db.models.sql.query import Query

    from sharded_orm.exceptions import ScatterError
    from sharded_orm.scatter.keys import Row

# Rows read at a time, as in QuerySet.iterator().
CHUNK_SIZE = 2000

OnFailure = Callable[["ScatterError"], None]


def fetch(
    queryset: QuerySet[Any],
    targets: Sequence[Target],
    partial: bool = False,
    *,
    on_failure: OnFailure | None = None,
    local_columns: frozenset[str] = frozenset(),
    chunk_size: int = CHUNK_SIZE,
    stream: bool = False,
) -> Iterator[Any]:
    """Yield what ``queryset`` yields, from all ``targets`` as if from one database.

    Order, OFFSET and LIMIT, ``distinct()`` and groups hold over all shards; instances
    carry the alias of their own shard. ``local_columns`` are the columns of the shard
    key: groups that contain them lie on one shard each.

    With ``stream`` the rows of an unlimited query stay on the servers until they are
    asked for, ``chunk_size`` at a time; each batch holds a session meanwhile, and a server
    gives up on a reader that pauses for its ``net_write_timeout`` (60 seconds).

    Raises :exc:`ScatterNotSupported` for what cannot be merged exactly and
    :exc:`ScatterError` when a shard does not answer. With ``partial`` the rows of the
    others are yielded, and ``on_failure`` gets that error after the last row.
    Belongs to the calling thread; other nodes are asked from threads of its own.
    """
    failures = Failures(len(targets), partial=partial, report=on_failure)
    try:
        if targets:
            with ExitStack() as stack:
                plan, rows = _rows(targets, failures, local_columns, chunk_size, stream, stack)
                yield from objects(queryset, plan, rows)
    finally:
        failures.finish()


def count(
    queryset: QuerySet[Any],
    targets: Sequence[Target],
    partial: bool = False,
    *,
    on_failure: OnFailure | None = None,
    local_columns: frozenset[str] = frozenset(),
) -> int:
    """``queryset.count()`` over all ``targets``; see :func:`fetch`."""
    if not targets:
        return 0
    query = targets[0].query
    check(query)
    failures = Failures(len(targets), partial=partial, report=on_failure)
    if query.distinct or query.group_by is not None:
        total = _count_rows(targets, failures, local_columns)
    else:
        whole = _transformed(targets, _without_limits)
        found = aggregation.aggregate(whole, query, {"__count": Count("*")}, failures)
        total = found["__count"]
    failures.finish()
    low, high = query.low_mark, query.high_mark
    return max(0, (total if high is None else min(total, high)) - low)


def exists(
    queryset: QuerySet[Any],
    targets: Sequence[Target],
    partial: bool = False,
    *,
    on_failure: OnFailure | None = None,
    local_columns: frozenset[str] = frozenset(),
) -> bool:
    """``queryset.exists()`` over all ``targets``; see :func:`fetch`."""
    if not targets:
        return False
    query = targets[0].query
    check(query)
    if query.low_mark and (query.distinct or query.group_by is not None):
        sliced = count(
            queryset, targets, partial, on_failure=on_failure, local_columns=local_columns
        )
        return sliced > 0
    if query.is_empty() or query.high_mark == query.low_mark:
        return False
    failures = Failures(len(targets), partial=partial, report=on_failure)
    asked = _transformed(targets, lambda q: q.exists())
    low = query.low_mark
    options = CompileOptions(limit=low + 1, existence=True, local_columns=local_columns)
    plan = make_plan(asked, options, failures)
    rows = merged(plan, Executor(plan, failures, CHUNK_SIZE))
    found = next(cut(rows, low, low + 1), None) is not None
    failures.finish()
    return found


def aggregate(
    queryset: QuerySet[Any],
    targets: Sequence[Target],
    aggregates: Mapping[str, Any],
    partial: bool = False,
    *,
    on_failure: OnFailure | None = None,
) -> dict[str, Any]:
    """``queryset.aggregate(**aggregates)`` over all ``targets``; see :func:`fetch`."""
    failures = Failures(len(targets), partial=partial, report=on_failure)
    query = targets[0].query if targets else queryset.query
    check(query)
    found = aggregation.aggregate(targets, query, aggregates, failures)
    failures.finish()
    return found


def _rows(
    targets: Sequence[Target],
    failures: Failures,
    local_columns: frozenset[str],
    chunk_size: int,
    stream: bool,
    stack: ExitStack,
) -> tuple[ScatterPlan, Iterator[Row]]:
    query = targets[0].query
    for target in targets:
        check(target.query)
    low, high = query.low_mark, query.high_mark
    options = CompileOptions(limit=high, local_columns=local_columns)
    wrapper: Any = connections[targets[0].shard.alias]
    union = wrapper.features.can_union_shards
    if two_phase.applies(query, targets, high, union):
        found = two_phase.fetch(query, targets, options, failures, low)
        if found is not None:
            plan, rows = found
            return plan, iter(rows)
    stream = stream and high is None
    plan = make_plan(targets, options, failures, batch=STREAM_BATCH if stream else None)
    executor = Executor(plan, failures, chunk_size, stream=stream)
    stack.callback(executor.close)
    return plan, cut(merged(plan, executor), low, high)


def _count_rows(
    targets: Sequence[Target], failures: Failures, local_columns: frozenset[str]
) -> int:
    """How many rows a query has that is distinct or grouped, its limits aside."""
    unlimited = _transformed(targets, _without_limits)
    plan = make_plan(unlimited, CompileOptions(local_columns=local_columns), failures)
    template = plan.template
    if template is None:
        return 0
    if template.distinct or template.merges_groups:
        return sum(1 for _ in merged(plan, Executor(plan, failures, CHUNK_SIZE)))
    plan = make_plan(unlimited, CompileOptions(local_columns=local_columns, counted=True), failures)
    return sum(row[0] for row in Executor(plan, failures, CHUNK_SIZE).chained())


def _without_limits(query: Query) -> Query:
    query = query.clone()
    # As Django: in a slice the order stays, because its columns count for DISTINCT.
    query.clear_ordering(force=False)
    query.clear_limits()
    return query


def _transformed(targets: Sequence[Target], change: Callable[[Query], Query]) -> Sequence[Target]:
    """The targets with their queries changed; those that share one share the changed one."""
    changed: dict[int, Query] = {}
    found = []
    for target in targets:
        key = id(target.query)
        if key not in changed:
            changed[key] = change(target.query)
        found.append(Target(target.shard, changed[key]))
    return found
