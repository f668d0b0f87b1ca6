"""Merges the rows of many shards by the query's ORDER BY, DISTINCT, GROUP BY, OFFSET and LIMIT."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from sharded_orm.scatter.partial_aggregates import Merger

if TYPE_CHECKING:
    from sharded_orm.scatter.comparison import Comparison, Row
    from sharded_orm.scatter.execute import Executor
    from sharded_orm.scatter.plan import ScatterPlan


def merged(plan: ScatterPlan, executor: Executor) -> Iterator[Row]:
    """Return an iterator over the rows of all shards, in the order in which one database would
    return them.

    DISTINCT and GROUP BY are applied to the rows; OFFSET and LIMIT are not.
    """
    template = plan.template
    if template is None:
        return iter(())
    comparison = plan.comparison
    if template.merges_groups:
        return iter(_groups(plan, executor.chained()))
    rows: Iterator[Row]
    if template.order:
        rows = heapq.merge(*executor.streams(), key=comparison.order(template.order))
    else:
        rows = executor.chained()
    if template.distinct:
        rows = _distinct(rows, comparison, template.distinct)
    return rows


def cut(rows: Iterable[Row], low: int, high: int | None) -> Iterator[Row]:
    """Return the rows from number ``low`` up to, but not including, ``high``: OFFSET and LIMIT.

    Rows are counted from 0; None for ``high`` means all rows to the end.
    """
    return islice(rows, low, high)


def _distinct(rows: Iterable[Row], comparison: Comparison, columns: Sequence[int]) -> Iterator[Row]:
    identity = comparison.identity(columns)
    seen: set[tuple[Any, ...]] = set()
    for row in rows:
        key = identity(row)
        if key not in seen:
            seen.add(key)
            yield row


def _groups(plan: ScatterPlan, rows: Iterable[Row]) -> list[Row]:
    """Return one merged row for each group of GROUP BY, in the query's order.

    Holds all merged rows in memory.
    """
    template, comparison = plan.template, plan.comparison
    assert template is not None
    identity = comparison.identity(template.groups)
    merger = Merger(template.partials, comparison)
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
        merged_rows.sort(key=comparison.order(template.order))
    return list(merged_rows)
