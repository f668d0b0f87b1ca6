"""Refuses statements that read rows of another database than the one that executes them.

One database executes a statement with its joins, ``select_related`` and subqueries. So every table
in the statement must belong to the group of the query's model. Every row that the statement reads
must be on the shard that executes it. This is checked before the statement is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from django.db.models import CharField, ForeignKey, IntegerField, TextField
from django.db.models.expressions import Col
from django.db.models.lookups import Exact, IsNull
from django.db.models.sql import Query
from django.db.models.sql.constants import LOUTER
from django.db.models.sql.datastructures import Join

from sharded_orm import runtime
from sharded_orm.exceptions import CrossShardRelation
from sharded_orm.models.sharding import ordering
from sharded_orm.models.sharding.copies import has_copies
from sharded_orm.models.sharding.expressions import (
    Nested,
    ShardCondition,
    columns,
    parts_to_check,
    required_conditions,
    selected_annotations,
)
from sharded_orm.models.sharding.options import ShardOptions, group_of, shard_options, target_field
from sharded_orm.routing.where_clause import Bound, OnlyOnShard, is_from_django


class Colocation:
    """Checks that the database which executes a statement has all rows that the statement reads.

    :param options: the group and shard key of the statement's model; None for a global model.
    :param alias: the alias of a database for which the statement can be compiled.
    :param shards: the numbers of the shards that execute the statement; None for all shards of the
        group.
    :param bound_of: a function that returns the shards that the conditions of a subquery determine.
        It returns None if they determine none.
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
        beside: frozenset[str] = frozenset(),
    ) -> None:
        """Raise :exc:`CrossShardRelation` if a row that ``query`` reads may be elsewhere.

        Elsewhere means in another database than those that execute the statement.

        :param outer: the queries that enclose ``query``, outermost first; empty if ``query`` is not
            a subquery.
        :param ordered: True if the SQL will have an ORDER BY, so that its expressions must be
            checked, too.
        :param values: other resolved expressions of the statement to check, such as values to be
            written.
        :param beside: aliases of shards. If there are any, the result of the subquery ``query``
            does not matter on other shards; see :attr:`Nested.beside`.
        :raises UnknownExpression: the library cannot know which rows an expression reads.

        Cost: next to nothing for a query on one table with plain values. ``query`` is never sent.
        Only ``bound_of`` may send a query, to the directory (the table of each key's shard).
        """
        for combined in query.combined_queries:
            if combined.model is not None:
                self._check_model(query, combined.model, "is combined with one on", copies=False)
            self.check(combined, outer, beside=beside)
        values = [*values, *selected_annotations(query)]
        if (ordered or query.distinct_fields) and not ordering.is_plain(query):
            query, order = ordering.resolved(query, self._alias)
            values = [*values, *order]
        elif ordered:
            values = [*values, *ordering.annotations_in_order(query)]
        if query.select_related:
            query = self._check_select_related(query)
        self._check_joins(query)
        for part in parts_to_check(query, *values, trusted=self._options is None):
            if isinstance(part, ShardCondition):
                if outer or part.in_expression or part.in_xor:
                    self._check_shard_condition(part, beside)
                continue
            inner = part.query
            if inner.model is not None:
                self._check_model(query, inner.model, "has a subquery on")
            self.check(inner, [*outer, query], beside=beside | part.beside)
            if self._options is not None:
                self._check_nested(query, part, [*outer, query])

    # -- Instances

    def _check_shard_condition(self, part: ShardCondition, beside: frozenset[str]) -> None:
        """Raise an error if an expression or subquery compares with an instance of another shard.

        ``filter(album=album)`` also adds a condition on the album's shard. In the WHERE of the
        statement itself, this is no problem, because the condition is written anew for each shard
        that executes the statement.

        In a subquery, or in an expression such as ``When(album=album, …)``, the condition is not
        written anew, and is right only on the album's shard. So no other shard may execute the
        statement. The same applies to a comparison in an XOR; see :attr:`ShardCondition.in_xor`.
        """
        condition = part.condition
        shard = runtime.topology().resolve(condition.alias)
        if (
            shard is None
            or shard.group != self._group
            or condition.alias in beside
            or (condition.ids_are_unique and not part.in_xor)
        ):
            return
        if self._shards is None or not self._shards <= {shard.number}:
            if part.in_xor:
                raise condition.refusal_in_xor()
            raise OnlyOnShard(condition.alias).refusal()

    # -- Tables

    def _check_joins(self, query: Query) -> None:
        if len(query.alias_map) < 2:
            return
        tables: dict[str, Any] = query.alias_map
        models = {
            alias: _joined_model(join.join_field) if isinstance(join, Join) else query.model
            for alias, join in tables.items()
        }
        for alias, join in tables.items():
            # Check only joins with a reference. If Django has removed a join from the SQL, it is
            # still in alias_map, with a reference count of 0.
            # Skip a table that another package has joined by a class of its own, such as a common
            # table expression: parts_to_check() refuses it.
            if isinstance(join, Join) and query.alias_refcount[alias]:
                self._check_model(query, models[alias], "joins")
                self._check_way_from_copy(query, models[join.parent_alias], models[alias])
                self._check_join(query, join)
        # The loop above does not check the first table, because this is usually the table of
        # query.model. But if exclude() has made the subquery, Query.trim_start() has removed this
        # table, and the first table is that of another model. Find that model by the columns in the
        # conditions.
        for lookup in required_conditions(query.where):
            for column in columns(getattr(lookup, "lhs", None)):
                if column.alias in tables:
                    self._check_model(query, column.target.model, "reads")

    def _check_way_from_copy(self, query: Query, model: Any, joined: Any) -> None:
        """Raise an error if a join leads from copies of global rows back to rows of the group.

        Global rows of a reference model are copied to every shard. Rows on several shards may refer
        to the same global row. A join on one shard would find only the rows of that shard.
        """
        if self._group is not None and has_copies(model) and not has_copies(joined):
            raise CrossShardRelation(
                f"The query on {_model_name(query)} goes from {model.__name__}, whose rows are copied to all"
                f" shards, to {joined.__name__}, and would miss its rows on other shards. Query them one"
                " after the other."
            )

    def _check_join(self, query: Query, join: Any) -> None:
        """Raise an error if a row that ``join`` needs may be on another shard.

        A join along a foreign key or a generic relation is allowed, because it never leads to
        another shard.
        """
        field = getattr(join.join_field, "field", join.join_field)
        if self._group is None or isinstance(field, ForeignKey):
            return
        if getattr(field, "stays_on_shard", False):
            return
        # A ForeignObject may join rows of different shards. Allow this join only if rows
        # with equal values in two of the compared columns are always on one shard.
        if any(
            colocation_keys(left, self._group) & colocation_keys(right, self._group)
            for left, right in join.join_fields or ()
        ):
            return
        raise CrossShardRelation(
            f"The query on {_model_name(query)} joins {_joined_model(join.join_field).__name__} by"
            f" {field.name!r}, which is no foreign key, and would miss rows of other shards. Query"
            " them one after the other, or name a shard with using()."
        )

    def _check_model(self, query: Query, model: Any, verb: str, *, copies: bool = True) -> None:
        group = group_of(model)
        if group == self._group or (copies and self._group is not None and has_copies(model)):
            return
        where = "in the global database" if group is None else f"in group {group!r}"
        home = "global" if self._group is None else f"group {self._group!r}"
        raise CrossShardRelation(
            f"The query on {_model_name(query)} ({home}) {verb} {model.__name__}, which is"
            f" {where}. One statement cannot reach both: query them one after the other"
            " (prefetch_related does), or filter and order by the foreign key's value instead."
        )

    def _check_select_related(self, query: Query) -> Query:
        """Raise an error if ``select_related()`` follows a relation to another database.

        Return the query whose joins the caller must check. This is ``query`` itself, unless
        ``select_related()`` follows a :class:`FilteredRelation`. Then it is a copy of ``query``
        that has the joins of this relation.
        """
        meta: Any = query.get_meta()
        relations: Any = query.select_related
        if relations is True:
            self._check_required_relations(query, meta, query.max_depth)
            return query
        self._check_named_relations(query, meta, relations)
        # Django adds the joins of filtered relations only when it compiles the query, in
        # SQLCompiler.get_related_selections(). Add them here in the same way.
        filtered = query._filtered_relations.keys() & relations.keys()  # type: ignore[attr-defined]  # missing in Django's type stubs
        if filtered:
            query = query.chain()
            for name in filtered:
                joined: Any = query.setup_joins([name], meta, query.get_initial_alias())
                self._check_named_relations(query, joined.opts, relations[name])
        return query

    def _check_required_relations(self, query: Query, meta: Any, depth: int) -> None:
        """Raise an error if ``select_related()`` without names leads to another database.

        Without names, ``select_related()`` follows all foreign keys with ``null=False``.

        :param depth: the maximum length of a chain of relations to follow.
        """
        if not depth:
            return
        for field in meta.fields:
            remote = field.remote_field
            if remote and not field.null and not remote.parent_link:
                self._check_model(query, field.related_model, "follows (select_related)")
                self._check_required_relations(query, field.related_model._meta, depth - 1)

    def _check_named_relations(self, query: Query, meta: Any, relations: Any) -> None:
        names = {f.name: f for f in meta.fields if f.remote_field}
        names |= {o.field.related_query_name(): o for o in meta.related_objects if o.field.unique}
        for name, deeper in relations.items():
            relation = names.get(name)
            if relation is None or relation.related_model is None:
                continue  # Skip an unknown name: Django raises an error for it, which lists the choices.
            self._check_model(query, relation.related_model, "follows (select_related)")
            self._check_way_from_copy(query, meta.model, relation.related_model)
            if deeper:
                self._check_named_relations(query, relation.related_model._meta, deeper)

    # -- Subqueries

    def _check_nested(self, query: Query, nested: Nested, outer: Sequence[Query]) -> None:
        """Raise an error if a shard that executes the statement may lack rows of the subquery.

        There is no error in three cases:

        - The statement is for one shard, and the subquery's own conditions determine the same
          shard.
        - The subquery's own conditions show that no row can meet them.
        - A condition compares a column of the subquery with a column of the outer query, and rows
          with equal values in these columns are always on one shard.
        """
        inner = nested.query
        if not inner.combinator and has_copies(inner.model):
            # Each shard has all rows that the subquery reads, because they are copies of global
            # rows. (check() has made sure that the subquery reads no other rows.)
            return
        parts = inner.combined_queries or (inner,)
        if not inner.combinator and self._is_tied(nested, outer):
            return
        for part in parts:
            bound = self._bound_of(part)
            if bound is None:
                raise CrossShardRelation(
                    f"The query on {_model_name(query)} has a subquery on {_model_name(inner)} that does not say"
                    " which shard it is about, and would miss rows of other shards. Filter it by the"
                    " shard key; or tie it to the row outside by two columns whose equal values are"
                    " on one shard, such as filter(photo=OuterRef('pk')) with a foreign key; or"
                    " evaluate it first and pass its values as a list."
                )
            only_here = self._shards is not None and len(self._shards) == 1
            if bound.shards and not (only_here and bound.shards == self._shards):
                raise CrossShardRelation(
                    f"The query on {_model_name(query)} has a subquery about other shards"
                    f" ({bound.reason}). Evaluate it first and pass its values as a list."
                )

    def _is_tied(self, nested: Nested, outer: Sequence[Query]) -> bool:
        return self._is_correlated(nested.query, outer) or self._is_compared(nested, outer)

    def _is_correlated(self, inner: Query, outer: Sequence[Query]) -> bool:
        """Return whether a condition limits ``inner`` to rows on the shard of the outer row.

        For example, the condition is ``ref=OuterRef("pk")``, where ``ref`` is a foreign key. The
        subquery ``inner`` may also have a GROUP BY or a slice. These need no check, because the
        database applies them after the condition.
        """
        for lookup in required_conditions(inner.where):
            if isinstance(lookup, Exact) and is_from_django(lookup):
                pair = (columns(lookup.lhs), columns(lookup.rhs))
                for inner_columns, outer_columns in (pair, pair[::-1]):
                    if (
                        inner_columns
                        and len(inner_columns) == len(outer_columns)
                        and all(column.alias in inner.alias_map for column in inner_columns)
                        and _belong_to_outer(outer_columns, inner, outer)
                        and (
                            self._are_colocated(inner_columns, outer_columns)
                            or self._are_about(inner, inner_columns[0], outer_columns[0])
                        )
                    ):
                        return True
        return False

    def _are_about(self, inner: Query, object_id: Col, pk: Col) -> bool:
        """Return whether the rows of ``inner`` refer to the outer row by a GenericForeignKey.

        If so, the rows of the subquery ``inner`` are on the shard of the outer row.

        :param object_id: a column of ``inner`` that a condition compares with ``pk``. The rows
            refer to the outer row only if another condition compares their content type with its
            model.
        :param pk: a column of the outer query.
        """
        model: Any = object_id.target.model
        if self._group != group_of(model) or not pk.target.primary_key:
            return False
        for field in model._meta.private_fields:
            stays_on_shard = getattr(field, "stays_on_shard", False)
            if stays_on_shard and getattr(field, "fk_field", None) == object_id.target.name:
                type_field = model._meta.get_field(field.ct_field)
                for type_id in required_values(inner, object_id.alias, type_field):
                    about = field.get_content_type(id=type_id).model_class()
                    return (
                        about is not None
                        and about._meta.concrete_model is pk.target.model._meta.concrete_model
                        and self._group == group_of(about)
                    )
        return False

    def _is_compared(self, nested: Nested, outer: Sequence[Query]) -> bool:
        """Return whether each shard can evaluate ``pk__in=….values("ref")`` without other shards.

        On each shard, the subquery returns only rows of that shard. This is enough if rows with
        equal values on the two sides of ``IN`` are always on one shard. Return False for a subquery
        with a slice or an aggregate, because it would need the rows of all shards.
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
            or not _belong_to_outer(compared, inner, outer)
            or not self._are_colocated(selected, compared)
        ):
            return False
        # If one side has a NULL, SQL's ``IN`` can yield NULL instead of false. A shard does not see
        # a NULL that is in a row of another shard, so its ``IN`` yields false. The difference
        # matters, for example, under NOT. So if it may matter, neither side may contain NULL.
        return nested.certain or (
            not any(_may_be_null(column, inner, _not_null_columns(inner)) for column in selected)
            and not any(_may_be_null(column, outer[-1], nested.not_null) for column in compared)
        )

    def _are_colocated(self, columns: Sequence[Col], others: Sequence[Col]) -> bool:
        """Return whether two rows with equal values in these columns are always on one shard.

        :param columns: the columns with the values of the first row.
        :param others: the columns with the values of the second row, in the same order.
        """
        assert self._options is not None
        group = self._options.group
        return any(
            colocation_keys(column.target, group) & colocation_keys(other.target, group)
            for column, other in zip(columns, others, strict=True)
        )


def required_values(query: Query, alias: str | None, field: Any) -> Iterator[int]:
    """Yield each number n for which all rows of ``query`` must meet the condition ``field = n``.

    :param alias: the alias of the table to which ``field`` belongs, because a query may have this
        table more than once.
    """
    for lookup in required_conditions(query.where):
        if isinstance(lookup, Exact) and is_from_django(lookup) and isinstance(lookup.rhs, int):
            for column in columns(lookup.lhs):
                if column.alias == alias and column.target is field:
                    yield lookup.rhs


def _joined_model(join_field: Any) -> Any:
    """Return the model whose table a join along ``join_field`` adds to the query."""
    field = getattr(join_field, "field", join_field)
    # A foreign key is declared on the model that has the reference, but a generic relation on the
    # model to which the rows refer. So for a generic relation, ``join_field.model`` is the joined
    # model, and not ``join_field.related_model``.
    is_generic = field.one_to_many
    return join_field.model if is_generic else join_field.related_model


def colocation_keys(field: Any, group: str) -> frozenset[tuple[Any, ...]]:
    """Return tokens that tell with which other fields ``field`` can be compared on one shard.

    A token is a tuple. If two fields have a token in common, two rows with equal values in these
    fields are always on the same shard of ``group``. So each shard can evaluate a join or a
    comparison of the two fields without the rows of other shards.

    A field gets these tokens:

    - one if its values determine the shard,
    - one for each primary key that it is or refers to.

    If a field has no token, rows on several shards may have the same value in it.
    """
    keys: set[tuple[Any, ...]] = set()
    options = shard_options(field.model)
    if options is None or options.group != group:
        return frozenset()
    if options.names_shard(field):
        keys.add(("key", _value_kind(field)))
    while True:
        if field.primary_key:
            keys.add(("row", field.model._meta.concrete_model, field.column))
        remote = shard_options(field.related_model) if field.is_relation else None
        if remote is None or remote.group != group:
            return frozenset(keys)
        field = field.target_field
        if not field.primary_key:
            # The foreign key refers to a field that is not a primary key. Such a field is unique
            # only within each shard, so add no token.
            return frozenset(keys)


def _value_kind(field: Any) -> Any:
    """Return a class that stands for the kind of values of ``field``, such as text.

    Equal values of the same kind are the same shard key. Values of different kinds may be different
    shard keys, such as the number 1 and the text "1".
    """
    field = target_field(field)
    if isinstance(field, IntegerField):
        return IntegerField
    return TextField if isinstance(field, CharField | TextField) else type(field)


def _belong_to_outer(columns: Sequence[Col], inner: Query, outer: Sequence[Query]) -> bool:
    return all(
        column.alias not in inner.alias_map and any(column.alias in q.alias_map for q in outer)
        for column in columns
    )


def _not_null_columns(query: Query) -> tuple[Col, ...]:
    return tuple(
        column
        for lookup in required_conditions(query.where)
        if isinstance(lookup, IsNull) and is_from_django(lookup) and lookup.rhs is False
        for column in columns(lookup.lhs)
    )


def _may_be_null(column: Col, query: Query, not_null: Sequence[Col]) -> bool:
    if any(column.alias == c.alias and column.target == c.target for c in not_null):
        return False
    table: Any = query.alias_map.get(column.alias)
    return table is None or column.target.null or table.join_type == LOUTER


def _model_name(query: Query) -> str:
    meta: Any = query.get_meta()
    return str(meta.object_name) if meta is not None else "values"
