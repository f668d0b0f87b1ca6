"""Reads the first rows of a query over many shards in two phases.

For example, a query asks for the 20 newest photos of all shards. The first phase reads the 20
newest photos of each shard (the candidates), but only their primary keys and ORDER BY values. From
all candidates, it chooses the 20 newest (the winners). The second phase reads the complete rows of
the winners. So complete rows are not sent for most of the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.db.models import Value

from sharded_orm.scatter.execute import Executor
from sharded_orm.scatter.failures import Failures
from sharded_orm.scatter.merge import cut, merged
from sharded_orm.scatter.plan import ScatterPlan, Target, make_plan
from sharded_orm.scatter.template import CompileOptions

if TYPE_CHECKING:
    from django.db.models.sql.query import Query

    from sharded_orm.scatter.comparison import Row

# Two phases are used only for results of at most this many rows, because the statement of the
# second phase contains the keys of all these rows. For more rows, it would cost too much.
MAX_WINNERS = 1000
# Two phases are used only if the first phase reads at least this many candidates (the first rows of
# each shard) in total. For fewer candidates, one phase is cheaper.
MIN_CANDIDATES = 100


def applies(query: Query, targets: Sequence[Target], limit: int | None, union: bool) -> bool:
    """Whether reading in two phases is possible and worthwhile.

    This is possible only if the primary key identifies each row of ``query`` within a shard.

    :param limit: the number of rows to read from each shard, including those that OFFSET skips;
        None means all rows.
    :param union: whether one statement can read many shards.
    """
    return (
        union
        and limit is not None
        and query.low_mark < limit <= query.low_mark + MAX_WINNERS
        and len(targets) * limit >= MIN_CANDIDATES
        and not query.distinct
        and query.group_by is None
        and query.model is not None
        and len(query.model._meta.pk_fields) == 1
        and _selects_much(query)
        and not _orders_by_constant(query)
        and all(
            join.join_type is None or join.join_field.many_to_one or join.join_field.one_to_one
            for alias, join in query.alias_map.items()
            if query.alias_refcount[alias]
        )
    )


def _selects_much(query: Query) -> bool:
    if query.default_cols:
        return True
    return len(query.select) + len(query.annotation_select) > 4


def _orders_by_constant(query: Query) -> bool:
    """Whether ``order_by()`` names an annotation that is a ``Value()``.

    The first phase does not select annotations. For a constant that is not selected, Django writes
    a ``CAST`` that some databases do not accept, such as ``CAST(1.5 AS numeric(None, None))``.
    """
    for key in query.order_by:
        expression = getattr(key, "expression", key)
        name = getattr(expression, "name", expression)
        if isinstance(name, str) and isinstance(query.annotations.get(name.lstrip("-+")), Value):
            return True
    return False


def fetch(
    query: Query,
    targets: Sequence[Target],
    options: CompileOptions,
    failures: Failures,
    low: int,
) -> tuple[ScatterPlan, list[Row]] | None:
    """Read in two phases. Return a pair (plan of the last phase that was executed, rows).

    The rows are those from number ``low`` up to, but not including, ``options.limit``, in the order
    of the query.

    Sometimes the second phase does not find a row that the first phase has chosen: the row was
    deleted or changed meanwhile, or an inner join of ``select_related()`` excludes it. Then return
    None, because the result would have too few rows; the caller must read again, in one phase. But
    if a shard has failed, its rows are expected to be missing, so return the rows that were found.
    """
    # Many targets may have the same query object, and make_plan() compiles each query object once
    # per node. So make only one changed copy of each query object, which these targets share.
    queries = {id(t.query): t.query for t in targets}
    key_queries = {key: _keys_query(query) for key, query in queries.items()}
    keys = [Target(shard, key_queries[id(query)], hidden) for shard, query, hidden in targets]
    limit = options.limit
    first = make_plan(
        keys,
        CompileOptions(limit=limit, with_pk=True, local_columns=options.local_columns),
        failures,
    )
    if first.template is None:
        return first, []
    pk = first.template.pk
    assert pk is not None
    marker = len(first.template.columns)
    rows = merged(first, Executor(first, failures, 2000))
    winners = [(row[marker], row[pk]) for row in cut(rows, low, limit)]
    pks: dict[int, list[Any]] = {}
    for index, value in winners:
        pks.setdefault(index, []).append(value)
    second = make_plan(
        targets, CompileOptions(by_key=query.get_meta().pk, with_pk=True), failures, pks=pks
    )
    if second.template is None:
        return second, []
    pk = second.template.pk
    assert pk is not None
    marker = len(second.template.columns)
    rows_by_key = {
        (row[marker], row[pk]): row for row in Executor(second, failures, 2000).chained()
    }
    if any(w not in rows_by_key for w in winners) and not failures.causes:
        return None
    return second, [rows_by_key[w] for w in winners if w in rows_by_key]


def _keys_query(query: Query) -> Query:
    keys = query.clone()
    keys.clear_select_clause()
    keys.select = (query.model._meta.pk.get_col(keys.get_initial_alias()),)
    return keys
