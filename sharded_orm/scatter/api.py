"""The functions by which querysets read many shards: they fetch, count or aggregate rows.

:func:`exists` checks whether there are any rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.models import Count, F
from django.db.models.expressions import OrderBy

from sharded_orm.backends.features import features_of
from sharded_orm.scatter import first_rows, ungrouped_aggregates
from sharded_orm.scatter.counted_query import counted_query
from sharded_orm.scatter.execute import Executor
from sharded_orm.scatter.failures import Failures
from sharded_orm.scatter.merge import cut, merged
from sharded_orm.scatter.plan import STREAM_BATCH, ScatterPlan, Target, make_plan
from sharded_orm.scatter.refusals import check
from sharded_orm.scatter.rows import objects
from sharded_orm.scatter.template import CompileOptions

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.db.models.sql.query import Query

    from sharded_orm.exceptions import ScatterError
    from sharded_orm.scatter.comparison import Row

# The number of rows read at a time by default, as in QuerySet.iterator().
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
    """Yield the results of ``queryset`` from all ``targets``, as if from one database.

    Order, OFFSET, LIMIT, ``distinct()`` and GROUP BY apply to the rows of all shards together. Each
    instance has the database alias of its shard.

    :param targets: the shards, each with the query to send to it.
    :param partial: what to do if a shard does not answer. True yields the rows of the other shards;
        False raises :exc:`ScatterError`.
    :param on_failure: a function that is called with a :exc:`ScatterError` after the last row, if
        ``partial`` is true and a shard did not answer.
    :param local_columns: the columns of the shard key. If GROUP BY contains all of these columns,
        all rows of each group are on one shard.
    :param chunk_size: the number of rows read at a time.
    :param stream: whether to leave the rows on the servers until they are read; ignored if the
        query has a limit. Each streamed statement, for up to 1024 shards, occupies a database
        session until its rows are read. A server drops a reader that pauses for longer than
        ``net_write_timeout`` (60 seconds).
    :raises ScatterNotSupported: the results cannot be merged exactly.
    :raises ScatterError: a shard does not answer, and ``partial`` is false.

    The returned iterator must be used in the calling thread. The scatter queries the nodes
    (database servers) in parallel, in threads of this package.
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
    """Return the number of rows of ``queryset`` on all ``targets`` (shards), as ``count()`` does.

    For the parameters and errors, see :func:`fetch`.
    """
    if not targets:
        return 0
    query = targets[0].query
    check(query)
    failures = Failures(len(targets), partial=partial, report=on_failure)
    number = _count_slice(_transformed(targets, counted_query), failures, local_columns)
    failures.finish()
    return number


def exists(
    queryset: QuerySet[Any],
    targets: Sequence[Target],
    partial: bool = False,
    *,
    on_failure: OnFailure | None = None,
    local_columns: frozenset[str] = frozenset(),
) -> bool:
    """Return whether ``queryset`` has any row on the ``targets`` (shards), as ``exists()`` does.

    For the parameters and errors, see :func:`fetch`.
    """
    if not targets:
        return False
    query = targets[0].query
    check(query)
    if query.is_empty() or query.high_mark == query.low_mark:
        return False
    failures = Failures(len(targets), partial=partial, report=on_failure)
    if query.low_mark and (query.distinct or query.group_by is not None):
        number = _count_slice(
            _transformed(targets, lambda q: q.exists(limit=False)), failures, local_columns
        )
        failures.finish()
        return number > 0
    existence = _transformed(targets, lambda q: q.exists())
    low = query.low_mark
    options = CompileOptions(limit=low + 1, existence=True, local_columns=local_columns)
    plan = make_plan(existence, options, failures)
    rows = merged(plan, Executor(plan, failures, CHUNK_SIZE))
    has_row = next(cut(rows, low, low + 1), None) is not None
    failures.finish()
    return has_row


def aggregate(
    queryset: QuerySet[Any],
    targets: Sequence[Target],
    aggregates: Mapping[str, Any],
    partial: bool = False,
    *,
    on_failure: OnFailure | None = None,
) -> dict[str, Any]:
    """Return the values of ``aggregates`` for the rows of ``queryset`` on all ``targets`` (shards).

    The values are those that ``queryset.aggregate(**aggregates)`` would return if one database had
    all rows. For the other parameters and the errors, see :func:`fetch`.
    """
    failures = Failures(len(targets), partial=partial, report=on_failure)
    query = targets[0].query if targets else queryset.query
    check(query)
    # The query of a target may be certain to have no rows, because of its shard.
    values = ungrouped_aggregates.aggregate(targets, queryset.query, aggregates, failures)
    failures.finish()
    return values


def _rows(
    targets: Sequence[Target],
    failures: Failures,
    local_columns: frozenset[str],
    chunk_size: int,
    stream: bool,
    stack: ExitStack,
) -> tuple[ScatterPlan, Iterator[Row]]:
    query = targets[0].query
    for one in {id(target.query): target.query for target in targets}.values():
        check(one)
    low, high = query.low_mark, query.high_mark
    options = CompileOptions(limit=high, local_columns=local_columns)
    union = features_of(connections[targets[0].shard.alias]).can_union_shards
    if first_rows.applies(query, targets, high, union):
        plan_and_rows = first_rows.fetch(query, targets, options, failures, low)
        if plan_and_rows is not None:
            plan, rows = plan_and_rows
            return plan, iter(rows)
    stream = stream and high is None
    plan = make_plan(targets, options, failures, batch=STREAM_BATCH if stream else None)
    executor = Executor(plan, failures, chunk_size, stream=stream)
    stack.callback(executor.close)
    return plan, cut(merged(plan, executor), low, high)


def _count_slice(
    targets: Sequence[Target], failures: Failures, local_columns: frozenset[str]
) -> int:
    """Return the number of rows that are left by the OFFSET and LIMIT of a query."""
    query = targets[0].query
    if query.distinct or query.group_by is not None or _may_join(query):
        total = _count_rows(targets, failures, local_columns)
    else:
        unlimited = _transformed(targets, _without_limits)
        values = ungrouped_aggregates.aggregate(unlimited, query, {"__count": Count("*")}, failures)
        total = values["__count"]
    low, high = query.low_mark, query.high_mark
    return max(0, (total if high is None else min(total, high)) - low)


def _may_join(query: Query) -> bool:
    """Return whether the ORDER BY of a query may join tables, and so add rows.

    For example, ``order_by("comments__stars")`` gives a photo once for each of its comments.
    """
    meta = query.get_meta()
    order: Any = query.order_by or (meta.ordering if query.default_ordering else ())
    if not order:
        return False
    own = {"pk", "?", *query.annotations}
    own.update(field.attname for field in meta.concrete_fields)
    # An order by a foreign key is that of the related model.
    own.update(field.name for field in meta.concrete_fields if not field.is_relation)
    for item in order:
        part: Any = item.expression if isinstance(item, OrderBy) else item
        name = part.name if isinstance(part, F) else part  # type: ignore[attr-defined]  # missing in the stubs
        if not isinstance(name, str) or name.removeprefix("-") not in own:
            return True
    return False


def _count_rows(
    targets: Sequence[Target], failures: Failures, local_columns: frozenset[str]
) -> int:
    """Return the number of rows of a query, without its OFFSET and LIMIT."""
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
    query.clear_limits()
    return query


def _transformed(targets: Sequence[Target], change: Callable[[Query], Query]) -> Sequence[Target]:
    """Return ``targets`` with each query replaced by ``change(query)``.

    A target is a shard with the query to send to it. ``change`` is called once per query: targets
    that share a query also share the changed query.
    """
    changed_queries: dict[int, Query] = {}
    changed_targets = []
    for target in targets:
        key = id(target.query)
        if key not in changed_queries:
            changed_queries[key] = change(target.query)
        changed_targets.append(target._replace(query=changed_queries[key]))
    return changed_targets
