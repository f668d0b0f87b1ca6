"""Merges the rows of many shards by the query's ORDER BY, DISTINCT, GROUP BY, OFFSET and LIMIT."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from sharded_orm.backends.features import features_of
from sharded_orm.scatter.partial_aggregates import Merger, rows_with_sums
from sharded_orm.scatter.value_ranks import Ranking

if TYPE_CHECKING:
    from sharded_orm.scatter.comparison import Row
    from sharded_orm.scatter.execute import Executor
    from sharded_orm.scatter.plan import ScatterPlan

# The number of rows that are read from each statement at a time if a server must rank their values.
ROUND = 5000


def merged(plan: ScatterPlan, executor: Executor) -> Iterator[Row]:
    """Return an iterator over the rows of all shards, in the order of the query.

    DISTINCT and GROUP BY are already applied to the rows, but OFFSET and LIMIT are not.
    """
    template = plan.template
    if template is None:
        return iter(())
    comparison = plan.comparison
    ranking = Ranking(plan, executor)
    if template.merges_groups:
        return iter(_groups(plan, ranking, executor.chained()))
    rows: Iterator[Row]
    columns = [key.column for key in template.order]
    if ranking.is_needed(columns):
        rows = _merged_by_ranks(
            executor.streams(), comparison.order(template.order), columns, ranking
        )
    elif template.order:
        rows = heapq.merge(*executor.streams(), key=comparison.order(template.order))
    else:
        rows = executor.chained()
    if template.distinct:
        rows = _distinct(plan, ranking, rows)
    return rows


def _merged_by_ranks(
    streams: Sequence[Iterator[Row]],
    key: Callable[[Row], Any],
    columns: Sequence[int],
    ranking: Ranking,
) -> Iterator[Row]:
    """Merge sorted streams of rows whose values only a server can compare.

    Works in rounds. In each round, the next rows of every stream are read, and a server ranks their
    values. Then rows are yielded in order, until all read rows of one stream are used up.

    :param key: the sort key. It reads the ranks of the values.
    :param columns: the positions of the columns that ``key`` reads.
    """
    if len(streams) == 1:
        yield from streams[0]
        return
    ended = [False] * len(streams)
    buffers: list[deque[Row]] = [deque() for _ in streams]
    while True:
        for number, buffer in enumerate(buffers):
            if not ended[number]:
                wanted = ROUND - len(buffer)
                more = list(islice(streams[number], wanted))
                buffer += more
                ended[number] = len(more) < wanted
        ranking.rank([row for buffer in buffers for row in buffer], order=columns)
        heads = [(key(buffer[0]), number) for number, buffer in enumerate(buffers) if buffer]
        heapq.heapify(heads)
        while heads:
            _, number = heads[0]
            buffer = buffers[number]
            yield buffer.popleft()
            if buffer:
                heapq.heapreplace(heads, (key(buffer[0]), number))
            elif ended[number]:
                heapq.heappop(heads)
            else:
                break
        else:
            return


def cut(rows: Iterable[Row], low: int, high: int | None) -> Iterator[Row]:
    """Return the rows to which OFFSET ``low`` and LIMIT restrict the result.

    These are the rows from number ``low`` up to, but not including, ``high``. The first row has
    number 0. If ``high`` is None, all rows to the end are returned.
    """
    return islice(rows, low, high)


def _begun(rows: Iterable[Row]) -> Iterator[Row]:
    """Read the first row, and return an iterator over all ``rows``, including this row.

    After the first row is read from unions (statements for many shards), each node has answered or
    failed, because the first statements of all nodes are executed together. Call this before rows
    are ranked, so that only shards that have not failed are used for ranking.
    """
    iterator = iter(rows)
    first = list(islice(iterator, 1))
    return chain(first, iterator)


def _distinct(plan: ScatterPlan, ranking: Ranking, rows: Iterator[Row]) -> Iterator[Row]:
    assert plan.template is not None
    columns = plan.template.distinct
    rows = _begun(rows)
    if ranking.is_needed_for_equality(columns):
        rows = iter(all_rows := list(rows))
        ranking.rank(all_rows, equality=columns)
    identity = plan.comparison.identity(columns)
    seen: set[tuple[Any, ...]] = set()
    for row in rows:
        key = identity(row)
        if key not in seen:
            seen.add(key)
            yield row


def _groups(plan: ScatterPlan, ranking: Ranking, rows: Iterable[Row]) -> list[Row]:
    """Return one merged row for each group of GROUP BY, in the query's order.

    Keeps all merged rows in memory, and the rows of all shards if a server ranks their values.
    """
    template, comparison = plan.template, plan.comparison
    assert template is not None
    extremes = [column for partial in template.partials for column in partial.compared]
    rows = _begun(rows_with_sums(comparison.checked(rows), template.partials))
    if ranking.is_needed_for_equality(template.groups) or ranking.is_needed(extremes):
        rows = list(rows)
        ranking.rank(rows, order=extremes, equality=template.groups)
    identity = comparison.identity(template.groups)
    features = features_of(template.compiler.connection)
    merger = Merger(template.partials, comparison, features)
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        key = identity(row)
        whole = groups.get(key)
        if whole is None:
            groups[key] = list(row)
        else:
            merger.add(whole, row)
    merged_rows = list(groups.values())
    for whole in merged_rows:
        merger.finish(whole)
    if template.order:
        ranking.rank(merged_rows, order=[order.column for order in template.order])
        merged_rows.sort(key=comparison.order(template.order))
    return list(merged_rows)
