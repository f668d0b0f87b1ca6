"""Converts the rows of a scatter to a queryset's results, with the queryset's iterable class."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from django.db.models.query import ModelIterable

from sharded_orm.scatter.refusals import refuse

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from sharded_orm.scatter.comparison import Row
    from sharded_orm.scatter.plan import ScatterPlan


def objects(queryset: QuerySet[Any], plan: ScatterPlan, rows: Iterable[Row]) -> Iterator[Any]:
    """Yield one result of ``queryset`` (an instance, a dict or a tuple) for each of ``rows``.

    The results have the order of the rows. An iterable class of Django, such as ``ModelIterable``,
    sets the same database alias on all model instances that it makes. So there is one iterable
    object per shard, and each row is passed to the iterable of its shard. Dicts and tuples have no
    alias, so one iterable converts all rows.
    """
    template = plan.template
    if template is None:
        return
    width, marker = template.width, len(template.columns)
    first = next(iter(plan.statements)).branches[0].shard.alias
    if not issubclass(queryset._iterable_class, ModelIterable):
        feed = ([row[:width]] for row in rows)
        yield from _iterable(queryset, template.compiler, first, feed)
        return
    feeds: dict[int, tuple[deque[list[Row]], Iterator[Any]]] = {}
    for row in rows:
        index = row[marker]
        pair = feeds.get(index)
        if pair is None:
            queue: deque[list[Row]] = deque()
            alias = plan.shards[index].alias
            pair = feeds[index] = (
                queue,
                iter(_iterable(queryset, template.compiler, alias, _drain(queue))),
            )
        queue, iterator = pair
        queue.append([row[:width]])
        yield next(iterator)


def _drain(queue: deque[list[Row]]) -> Iterator[list[Row]]:
    while True:
        if not queue:
            raise refuse(
                "an iterable class that reads ahead of what it yields",
                "use one that makes one object of each row",
            )
        yield queue.popleft()


def _iterable(
    # The parameters are of type Any, because the type stubs lack a queryset's private attributes.
    queryset: Any,
    compiler: Any,
    alias: str,
    results: Iterator[list[Row]],
) -> Iterator[Any]:
    prepared = copy.copy(compiler)
    prepared.execute_sql = lambda *args, **kwargs: results
    query = compiler.query.clone()
    query.get_compiler = lambda *args, **kwargs: prepared
    single = queryset._clone()
    single._query = query
    single._db = alias
    single._result_cache = None
    iterator: Iterator[Any] = iter(queryset._iterable_class(single))
    return iterator
