"""Refuses queries that read rows of another database than the one that runs them.

A join, ``select_related`` or a subquery is run by the one database that holds the shard. So every
table in a statement must belong to the query's own group, and a subquery must be about rows of
the very shard. Nothing is sent before that is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from django.db.models import ForeignKey
from django.db.models.expressions import Col
from django.db.models.lookups import Exact, IsNull
from django.db.models.sql import Query
from django.db.models.sql.constants import LOUTER

from sharded_orm.exceptions import CrossShardRelation
from sharded_orm.models.sharding import ordering
from sharded_orm.models.sharding.expressions import (
    Nested,
    columns,
    demanded,
    nested_queries,
)
from sharded_orm.models.sharding.options import ShardOptions, placements, shard_options
from sharded_orm.routing.where import Bound, is_from_django


class Colocation:
    """The database that runs a statement, and whether it has all rows that the statement reads.

    :param options: of the sharded model that the statement is about; None: a global one.
    :param alias: a database that the statement can be compiled for.
    :param shards: the numbers of the shards that run it; None for all of the group.
    :param bound_of: the shards that a subquery's own conditions name, or None.
    """

    def __init__(
        self,
        options: ShardOptions | None,
        alias: str,
        shards: frozenset[int] | None = None,
        bound_of: Callable[[Query], Bound | None] = lambda query: None,
    ) -> None:
        self._options = options
        self._group = options.group if options is not None else None
        self._alias = alias
        self._shards = shards
        self._bound_of = bound_of

    def check(
        self,
        query: Query,
        outer: Sequence[Query] = (),
        *,
        ordered: bool = True,
        values: Iterable[Any] = (),
    ) -> None:
        """Raise :exc:`CrossShardRelation` unless each shard has all rows that ``query`` reads.

        :param outer: the queries that it stands inside of.
        :param ordered: whether the order of the rows will be compiled.
        :param values: resolved expressions that stand in the statement beside the query.
        :raises UnknownExpression: it holds what might read other rows, and nobody can tell.

        Costs next to nothing for a query on one table with plain values. Sends nothing but what
        ``bound_of`` asks the directory.
        """
        for part in query.combined_queries:
            if part.model is not None:
                self._check_model(query, part.model, "is combined with one on")
            self.check(part, outer)
        if (ordered or query.distinct_fields) and not ordering.is_plain(query):
            query, order = ordering.resolved(query, self._alias)
            values = [*values, *order]
        if query.select_related:
            query = self._check_select_related(query)
        self._check_joins(query)
        for nested in nested_queries(query, *values, trusted=self._options is None):
            inner = nested.query
            if inner.model is not None:
                self._check_model(query, inner.model, "has a subquery on")
            self.check(inner, [*outer, query])
            if self._options is not None:
                self._check_nested(query, nested, [*outer, query])

    # -- Tables

    def _check_joins(self, query: Query) -> None:
        if len(query.alias_map) < 2:
            return
        tables: dict[str, Any] = query.alias_map
        for alias, join in tables.items():
            # A join that Django has trimmed stays in the map, unreferenced.
            if join.parent_alias is not None and query.alias_refcount[alias]:
                self._check_model(query, join.join_field.related_model, "joins")
                self._check_join(query, join)

    def _check_join(self, query: Query, join: Any) -> None:
        """Raise if the rows joined may be on other shards; foreign keys are believed."""
        field = getattr(join.join_field, "field", join.join_field)
        if self._group is None or isinstance(field, ForeignKey):
            return
        # A GenericRelation or a ForeignObject: no database enforces it.
        if any(
            placements(one, self._group) & placements(other, self._group)
            for one, other in join.join_fields or ()
        ):
            return
        raise CrossShardRelation(
            f"The query on {_name(query)} joins {join.join_field.related_model.__name__} by"
            f" {field.name!r}, which is no foreign key, and would miss rows of other shards. Query"
            " them one after the other, or name a shard with using()."
        )

    def _check_model(self, query: Query, model: Any, verb: str) -> None:
        options = shard_options(model)
        if (options.group if options is not None else None) == self._group:
            return
        where = "in the global database" if options is None else f"in group {options.group!r}"
        home = "global" if self._group is None else f"group {self._group!r}"
        raise CrossShardRelation(
            f"The query on {_name(query)} ({home}) {verb} {model.__name__}, which is"
            f" {where}. One statement cannot reach both: query them one after the other"
            " (prefetch_related does), or filter and order by the foreign key's value instead."
        )

    def _check_select_related(self, query: Query) -> Query:
        """Check what is followed; the query with the joins of filtered relations among it."""
        meta: Any = query.get_meta()
        wanted: Any = query.select_related
        if wanted is True:
            self._check_followed(query, meta, query.max_depth)
            return query
        self._check_wanted(query, meta, wanted)
        # As SQLCompiler.get_related_selections(), which joins these by itself.
        filtered = query._filtered_relations.keys() & wanted.keys()  # type: ignore[attr-defined]  # not in the stubs
        if filtered:
            query = query.chain()
            for name in filtered:
                joined: Any = query.setup_joins([name], meta, query.get_initial_alias())
                self._check_wanted(query, joined.opts, wanted[name])
        return query

    def _check_followed(self, query: Query, meta: Any, depth: int) -> None:
        """``select_related()`` without names follows whatever cannot be NULL."""
        if not depth:
            return
        for field in meta.fields:
            remote = field.remote_field
            if remote and not field.null and not remote.parent_link:
                self._check_model(query, field.related_model, "follows (select_related)")
                self._check_followed(query, field.related_model._meta, depth - 1)

    def _check_wanted(self, query: Query, meta: Any, wanted: Any) -> None:
        names = {f.name: f for f in meta.fields if f.remote_field}
        names |= {o.field.related_query_name(): o for o in meta.related_objects if o.field.unique}
        for name, deeper in wanted.items():
            relation = names.get(name)
            if relation is None or relation.related_model is None:
                continue  # Django reports an unknown name itself, with the choices.
            self._check_model(query, relation.related_model, "follows (select_related)")
            if deeper:
                self._check_wanted(query, relation.related_model._meta, deeper)

    # -- Subqueries

    def _check_nested(self, query: Query, nested: Nested, outer: Sequence[Query]) -> None:
        """Raise unless each shard of the statement has all rows that the subquery is about.

        It has them if the subquery's own conditions name this one shard, or if they tie its
        rows to the row outside by two columns whose equal values are on one shard.
        """
        inner = nested.query
        parts = inner.combined_queries or (inner,)
        if not inner.combinator and self._is_tied(nested, outer):
            return
        for part in parts:
            bound = self._bound_of(part)
            if bound is None:
                raise CrossShardRelation(
                    f"The query on {_name(query)} has a subquery on {_name(inner)} that does not say"
                    " which shard it is about, and would miss rows of other shards. Filter it by the"
                    " shard key; or tie it to the row outside by two columns whose equal values are"
                    " on one shard, such as filter(photo=OuterRef('pk')) with a foreign key; or"
                    " evaluate it first and pass its values as a list."
                )
            only_here = self._shards is not None and len(self._shards) == 1
            if bound.shards and not (only_here and bound.shards == self._shards):
                raise CrossShardRelation(
                    f"The query on {_name(query)} has a subquery about other shards"
                    f" ({bound.reason}). Evaluate it first and pass its values as a list."
                )

    def _is_tied(self, nested: Nested, outer: Sequence[Query]) -> bool:
        return self._is_correlated(nested.query, outer) or self._is_compared(nested, outer)

    def _is_correlated(self, inner: Query, outer: Sequence[Query]) -> bool:
        """Whether a condition ties each row of ``inner`` to the row outside: ``ref=OuterRef("pk")``.

        It holds before rows are grouped or sliced, so these may be.
        """
        for lookup in demanded(inner.where):
            if isinstance(lookup, Exact) and is_from_django(lookup):
                pair = (columns(lookup.lhs), columns(lookup.rhs))
                for own, theirs in (pair, pair[::-1]):
                    if (
                        own
                        and len(own) == len(theirs)
                        and all(column.alias in inner.alias_map for column in own)
                        and _are_outside(theirs, inner, outer)
                        and self._stay_together(own, theirs)
                    ):
                        return True
        return False

    def _is_compared(self, nested: Nested, outer: Sequence[Query]) -> bool:
        """Whether a comparison does so: ``pk__in=….values("ref")``.

        It sees the rows that the subquery returns on this shard. What depends on the rows that
        it does not return, as a slice or an aggregate does, would be another on each shard.
        """
        inner, compared = nested.query, columns(nested.compared)
        selected = tuple(column for part in inner.select for column in columns(part))
        if (
            not compared
            or len(selected) != len(compared)
            or not all(map(columns, inner.select))
            or inner.annotation_select
            or inner.extra_select
            or inner.is_sliced
            or inner.group_by is not None
            or inner.distinct_fields
            or inner.where.contains_aggregate
            or inner.where.contains_over_clause
            or not all(column.alias in inner.alias_map for column in selected)
            or not _are_outside(compared, inner, outer)
            or not self._stay_together(selected, compared)
        ):
            return False
        # A NULL among the values of another shard would turn "false" into "unknown" here.
        return nested.certain or (
            not any(_may_be_null(column, inner, _not_null(inner)) for column in selected)
            and not any(_may_be_null(column, outer[-1], nested.not_null) for column in compared)
        )

    def _stay_together(self, some: Sequence[Col], others: Sequence[Col]) -> bool:
        """Whether rows with equal values in these columns are on one shard."""
        assert self._options is not None
        group = self._options.group
        return any(
            placements(one.target, group) & placements(other.target, group)
            for one, other in zip(some, others, strict=True)
        )


def _are_outside(found: Sequence[Col], inner: Query, outer: Sequence[Query]) -> bool:
    return all(
        column.alias not in inner.alias_map and any(column.alias in q.alias_map for q in outer)
        for column in found
    )


def _not_null(query: Query) -> tuple[Col, ...]:
    return tuple(
        column
        for lookup in demanded(query.where)
        if isinstance(lookup, IsNull) and is_from_django(lookup) and lookup.rhs is False
        for column in columns(lookup.lhs)
    )


def _may_be_null(column: Col, query: Query, not_null: Sequence[Col]) -> bool:
    if any(column.alias == c.alias and column.target == c.target for c in not_null):
        return False
    table: Any = query.alias_map.get(column.alias)
    return table is None or column.target.null or table.join_type == LOUTER


def _name(query: Query) -> str:
    meta: Any = query.get_meta()
    return str(meta.object_name) if meta is not None else "values"
