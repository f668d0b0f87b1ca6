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
    if _is_from_django(queryset._iterable_class):
        query.get_compiler = lambda *args, **kwargs: prepared
    else:
        query.__class__ = type(query.__class__.__name__, (_SentQuery, query.__class__), {})
        query.__dict__["_sent"] = (prepared, _contents(query))
    single = queryset._clone()
    single._query = query
    single._db = alias
    single._result_cache = None
    iterator: Iterator[Any] = iter(queryset._iterable_class(single))
    return iterator


class _SentQuery:
    """The query that an iterable class of a project or of another package gets.

    The statements of the query have been sent already. If the iterable class changed the query now,
    for example by a further condition, the change would have no effect. So :meth:`get_compiler`
    refuses a query that was changed.
    """

    def get_compiler(self, *args: Any, **kwargs: Any) -> Any:
        compiler, contents = self.__dict__["_sent"]
        if _contents(self) != contents:
            raise refuse(
                "an iterable class that changes its query",
                "query one shard at a time, or read with values()",
            )
        return compiler


def _contents(query: Any) -> dict[str, Any]:
    """Return copies of the attributes of ``query``, also of those that another package has added."""
    contents = {
        name: copy.copy(value)
        for name, value in vars(query).items()
        if name not in _CHANGE_BY_READING
    }
    # Of the number of references to each table, only whether it is 0 shows in the SQL. A class that
    # asks for the name of the first table adds a reference, and changes nothing.
    contents["alias_refcount"] = {name for name, count in query.alias_refcount.items() if count}
    # A copy of a node shares its list of conditions.
    return {**contents, "where": query.where.clone()}


# Attributes that Django sets when it copies or compiles a query. They are not its contents.
_CHANGE_BY_READING = frozenset(
    {
        "_annotation_select_cache", "_extra_select_cache", "_lookup_joins", "_sent", "base_table",
        "filter_is_sticky", "subq_aliases", "table_map", "used_aliases",
    }
)  # fmt: skip


def _is_from_django(iterable_class: type) -> bool:
    modules = {cls.__module__ for cls in iterable_class.__mro__} - {"builtins", "typing"}
    return all(module.startswith(("django.", "sharded_orm.")) for module in modules)
