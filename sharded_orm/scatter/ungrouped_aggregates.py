"""``aggregate()`` over many shards: each shard returns a row of aggregates, and the rows are merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from django.core.exceptions import EmptyResultSet, FullResultSet
from django.db import DEFAULT_DB_ALIAS, connections
from django.db.models import Avg, Count, DurationField, ExpressionWrapper, Field, Sum
from django.db.models.functions import Coalesce
from django.db.models.sql.where import WhereNode

from sharded_orm import compat
from sharded_orm.backends.features import features_of
from sharded_orm.scatter.arithmetic import check_sum, divider, total_of
from sharded_orm.scatter.comparison import has_field
from sharded_orm.scatter.execute import Executor
from sharded_orm.scatter.failures import Failures
from sharded_orm.scatter.merge import merged
from sharded_orm.scatter.partial_aggregates import averaged
from sharded_orm.scatter.plan import Target, make_plan
from sharded_orm.scatter.refusals import refuse
from sharded_orm.scatter.summands import check, depends_on_precision, has_places_of_type
from sharded_orm.scatter.template import CompileOptions

if TYPE_CHECKING:
    from django.db.models.sql.query import Query

    from sharded_orm.scatter.plan import ScatterPlan

_CHUNK_SIZE = 2000

# Stands for the value of an aggregate of no rows.
_NO_ROWS = object()


class _Resolved(Exception):
    """Raised inside Django's ``get_aggregation()``, so that this method does not send its query.

    When the error is raised, the query is complete, so it can be sent to many shards instead.
    """

    def __init__(self, elide_empty: bool) -> None:
        self.elide_empty = elide_empty


class _Alias:
    """A placeholder that is passed to Django's ``get_aggregation()`` instead of a database alias.

    If an aggregate needs a subquery, Django tests whether the alias is true. A scatter cannot merge
    such an aggregate, so ``bool()`` of the placeholder raises the error that refuses it.
    """

    def __bool__(self) -> NoReturn:
        raise refuse(
            "an aggregate over slices, distinct rows, groups or subqueries",
            "aggregate the plain queryset, or compute with its rows in Python",
        )


@dataclass(frozen=True)
class Summary:
    """A query whose annotations are the aggregates to compute, as resolved by Django.

    If ``elide_empty`` (a flag of Django's compilers) is true, a query that certainly has no rows is
    not sent. If false, it is sent, because only the database can compute an aggregate of no rows.
    """

    query: Query
    elide_empty: bool


def summary(query: Query, aggregates: Mapping[str, Any]) -> Summary:
    """Return the query that Django would send to one database for ``aggregates``.

    Raises the same errors as Django, for example for an unknown field.
    """
    query = query.clone()

    def ready(using: Any, connection: Any = None, elide_empty: bool = True) -> NoReturn:
        raise _Resolved(elide_empty)

    query.get_compiler = ready  # type: ignore[assignment, method-assign]  # replaced only for this query
    try:
        query.get_aggregation(_Alias(), dict(aggregates))
    except _Resolved as resolved:
        del query.get_compiler
        return Summary(query, resolved.elide_empty)
    # Without aggregates, get_aggregation() compiles nothing, so _Resolved is not raised.
    return Summary(query, True)


def aggregate(
    targets: Sequence[Target],
    query: Query,
    aggregates: Mapping[str, Any],
    failures: Failures,
) -> dict[str, Any]:
    """Return a dict that maps the name of each aggregate to its value over all rows.

    The values have the types that a single database returns.

    :param query: the query for all shards.
    """
    if not aggregates:
        return {}
    summaries: dict[int, Summary] = {}
    targets_with_summaries: list[tuple[Target, Summary]] = []
    for target in targets:
        key = id(target.query)
        if key not in summaries:
            summaries[key] = summary(target.query, aggregates)
        targets_with_summaries.append((target, summaries[key]))
    first = targets_with_summaries[0][1] if targets_with_summaries else summary(query, aggregates)
    expressions = dict(first.query.annotation_select)
    distinct = {alias for alias, e in expressions.items() if _is_distinct(e)}

    for alias in distinct if targets else ():
        _check_distinct(expressions[alias], connections[targets[0].shard.alias])

    # Make these plans before anything is sent, because make_plan() raises an error for a query that
    # cannot be merged.
    plans = {
        alias: _distinct_plan(targets_with_summaries, alias, expressions[alias], failures)
        for alias in distinct
    }
    values: dict[str, Any] = {}
    plain = [alias for alias in expressions if alias not in distinct]
    if plain:
        values.update(_plain_values(targets_with_summaries, expressions, plain, failures))
    for alias, plan in plans.items():
        values[alias] = _distinct_value(plan, expressions[alias], failures)
    for name, value in values.items():
        if value is _NO_ROWS:
            values[name] = _value_without_rows(expressions[name], query)
    return {alias: values[alias] for alias in expressions}


def _without_default(expression: Any) -> Any:
    if type(expression) is Coalesce:
        return expression.get_source_expressions()[0]
    return expression


def _defaults(expression: Any) -> list[Any]:
    defaults: list[Any] = []
    if type(expression) is Coalesce:
        _, *defaults = expression.get_source_expressions()
    return defaults


def _is_distinct(expression: Any) -> bool:
    return bool(getattr(_without_default(expression), "distinct", False))


def _summary_targets(targets: Sequence[tuple[Target, Summary]], change: Any) -> list[Target]:
    changed_queries: dict[int, Query] = {}
    changed_targets = []
    for target, summary in targets:
        key = id(summary.query)
        if key not in changed_queries:
            changed_queries[key] = change(summary.query)
        changed_targets.append(target._replace(query=changed_queries[key]))
    return changed_targets


def _plain_values(
    targets: Sequence[tuple[Target, Summary]],
    expressions: Mapping[str, Any],
    aliases: Sequence[str],
    failures: Failures,
) -> dict[str, Any]:
    def only(query: Query) -> Query:
        query = query.clone()
        query.annotations = {alias: query.annotations[alias] for alias in aliases}
        query.set_annotation_mask(aliases)
        query.clear_ordering(force=True)
        query.clear_limits()
        query.select_related = False
        return query

    options = CompileOptions(
        summary=True, elide_empty=all(summary.elide_empty for _, summary in targets)
    )
    plan = make_plan(_summary_targets(targets, only), options, failures)
    executor = Executor(plan, failures, _CHUNK_SIZE)
    rows = list(merged(plan, executor))
    selected = [expressions[alias] for alias in aliases]
    if plan.template is None or not rows:
        return dict.fromkeys(aliases, _NO_ROWS)
    compiler = plan.template.compiler
    row = rows[0][: plan.template.width]
    converters = compiler.get_converters(selected)
    (values,) = compiler.apply_converters([row], converters)
    return dict(zip(aliases, values, strict=True))


def _value_without_rows(expression: Any, query: Query) -> Any:
    """Return the value that one database gives for an aggregate of no rows.

    :param query: the query for all shards.
    """
    value = expression.empty_result_set_value
    if value is NotImplemented:
        raise refuse(
            f"the aggregate {type(expression).__name__} of no rows", "give a plain default"
        )
    if value is None or not has_field(expression) or _has_certainly_no_rows(query):
        return value
    # A database would give a default, such as the 0 of ``Sum("price", default=0)``, as a value of
    # the aggregate's type. This conversion uses no connection.
    return expression.convert_value(value, expression, None)


def _has_certainly_no_rows(query: Query) -> bool:
    """Return whether Django sends no query with these conditions, and returns defaults as they are."""
    # Compile for the global database. A shard would take conditions for empty that are empty there
    # only.
    compiler: Any = query.clone().get_compiler(DEFAULT_DB_ALIAS)
    try:
        compiler.compile(compiler.query.where)
    except EmptyResultSet:
        return True
    except FullResultSet:
        pass  # There are no conditions.
    return False


def _check_distinct(expression: Any, connection: Any) -> None:
    """Raise an error if an aggregate with ``distinct=True`` cannot be computed.

    :raises ScatterNotSupported: it cannot be computed, for example because it is not Count, Sum or
        Avg.
    """
    aggregate = _without_default(expression)
    if type(aggregate) not in (Count, Sum, Avg):
        raise refuse(f"{type(aggregate).__name__}(distinct=True)", "compute it in Python")
    sources, _ = compat.arguments_of(aggregate)
    if len(sources) != 1:
        raise refuse("a distinct aggregate of several expressions", "use one")
    if type(aggregate) is not Count:
        check(aggregate, sources[0], features_of(connection), _defaults(expression))


def _distinct_plan(
    targets: Sequence[tuple[Target, Summary]], alias: str, expression: Any, failures: Failures
) -> ScatterPlan:
    """Return the plan that reads the distinct values of an aggregate with ``distinct=True``."""
    aggregate = _without_default(expression)

    def values(query: Query) -> Query:
        shard_aggregate = _without_default(query.annotations[alias])
        sources, condition = compat.arguments_of(shard_aggregate)
        (source,) = sources
        if type(aggregate) is Avg:
            source = averaged(source)
        elif not has_field(source):
            # Django does not know the type of these values (their output_field), and would raise an
            # error when the query returns them. A plain Field passes the driver's values on.
            source = ExpressionWrapper(source, Field())
        query = query.clone()
        query.annotations = {alias: source}
        query.set_annotation_mask([alias])
        query.clear_ordering(force=True)
        query.clear_limits()
        query.select_related = False
        query.distinct = True
        if condition is not None:
            query.where = WhereNode([query.where, condition])
        return query

    divides = type(aggregate) is not Count and depends_on_precision(
        compat.arguments_of(aggregate)[0][0], is_average=type(aggregate) is Avg
    )
    return make_plan(_summary_targets(targets, values), CompileOptions(divides=divides), failures)


def _distinct_value(plan: ScatterPlan, expression: Any, failures: Failures) -> Any:
    """Return the value of an aggregate with ``distinct=True``.

    Read the distinct values of every shard, remove the duplicates between shards, and aggregate the
    remaining values in Python.
    """
    if plan.template is None:
        return _NO_ROWS
    aggregate = _without_default(expression)
    compiler = plan.template.compiler
    features = features_of(compiler.connection)
    adds = type(aggregate) is not Count
    is_duration = adds and isinstance(aggregate.output_field, DurationField)
    executor = Executor(plan, failures, _CHUNK_SIZE)
    values_of_rows = (row[0] for row in plan.comparison.checked(merged(plan, executor)))
    different = (value for value in values_of_rows if value is not None)
    if not adds:
        return sum(1 for _ in different)
    total, count = total_of(different)
    if not count:
        return _NO_ROWS
    if type(aggregate) is Avg:
        (source,), _ = compat.arguments_of(aggregate)
        divide = divider(
            features, duration=is_duration, has_places_of_type=has_places_of_type(source)
        )
        total = divide(total, count)
    else:
        check_sum(total, features)
    (value,) = _converted(compiler, expression, total)
    return value


def _converted(compiler: Any, expression: Any, value: Any) -> Iterator[Any]:
    converters = compiler.get_converters([expression])
    ((converted,),) = compiler.apply_converters([[value]], converters)
    yield converted
