"""Refuses prefetches for rows of several shards if they compute something over all related rows.

One database prefetches with one statement for all instances. Several shards use one statement each.
All related rows of an instance are on its shard, and so in one statement. So these give the same
results as on one database:

- conditions, joins, orders, columns, and aggregates, because Django groups by the row
- ``distinct()`` without fields, because it compares whole rows, with their primary keys
- slices, because Django numbers the rows of each instance apart, by a window over the relation
- subqueries, which :class:`~sharded_orm.models.sharding.colocation.Colocation` checks

These may give other results, and are refused here:

- window functions and ``distinct("stars")``, unless the rows of each partition, or with equal
  values, are on one shard
- groups that are not rows, which no method of querysets makes
- ``union()`` and its like: Django adds no condition to their parts, so each shard would return the
  rows of all instances
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.db.models import CharField, TextField
from django.db.models.constants import LOOKUP_SEP
from django.db.models.expressions import Col, Window
from django.db.models.fields.related_descriptors import (
    ForwardManyToOneDescriptor,
    ManyToManyDescriptor,
    ReverseManyToOneDescriptor,
    ReverseOneToOneDescriptor,
)
from django.db.models.lookups import Exact, In, IsNull
from django.db.models.sql import Query
from django.db.models.sql.constants import LOUTER

from sharded_orm.models.sharding.colocation import colocation_keys, required_values
from sharded_orm.models.sharding.expressions import columns, required_conditions
from sharded_orm.models.sharding.options import group_of, shard_options, target_field
from sharded_orm.scatter.refusals import has_window_text, parts_of, refuse

_REMEDY = "compute it in Python, or prefetch for rows of one shard"


def refuse_lookups(model: Any, lookups: Sequence[Any], *, inside: bool = True) -> None:
    """Check the querysets of the ``Prefetch`` objects in ``lookups``, before anything is sent.

    :param model: the model of the instances, which are on several shards.
    :param inside: whether the instances of each statement are all those of one shard. False after a
        lookup has left the group: then each statement may have rows of any shard.
    :raises ScatterNotSupported: a queryset computes something over the rows of several shards.
    """
    for lookup in lookups:
        queryset = getattr(lookup, "queryset", None)
        querysets = getattr(lookup, "querysets", None) or ([] if queryset is None else [queryset])
        if not querysets:
            continue
        stays, matched = _relation(model, lookup.prefetch_through)
        stays = stays and inside
        for queryset in querysets:
            if (query := getattr(queryset, "query", None)) is None:
                continue
            refuse_sets(query, group_of(model) if stays else None, matched)
            refuse_lookups(queryset.model, queryset._prefetch_related_lookups, inside=stays)


def refuse_sets(query: Query, group: str | None, matched: Sequence[Any] = ()) -> None:
    """Raise an error if ``query`` computes something over the rows of several shards.

    :param query: the query of related rows, which is run on each of several shards.
    :param group: the group of the instances if the related rows of each shard are on this shard.
        None if each statement may read any rows.
    :param matched: fields by which Django will match the rows with instances. They are not NULL in
        the result, although ``query`` has no condition on them yet.
    :raises ScatterNotSupported: ``query`` does so.
    """
    if query.combinator:
        raise refuse(
            f"{query.combinator}() in a prefetch",
            "combine with Q objects and |, or prefetch for rows of one shard",
        )
    is_apart = _Apart(query, group, matched)
    for part in _parts(query):
        if isinstance(part, Window):
            by: Any = part.partition_by
            if by is not None and any(map(is_apart, by.get_source_expressions())):
                continue
            raise refuse(
                "a window function in a prefetch",
                f"add the related row or the shard key to its partition_by, {_REMEDY}",
            )
        if has_window_text(part):
            raise refuse("SQL text with OVER in a prefetch", f"write it with Window, {_REMEDY}")
    for select, _ in query.extra.values():
        if has_window_text(select):
            raise refuse("SQL text with OVER in a prefetch", f"write it with Window, {_REMEDY}")
    if query.distinct_fields:
        copy = query.chain()
        fields = [copy.resolve_ref(name, allow_joins=True) for name in query.distinct_fields]  # type: ignore[attr-defined,unused-ignore]  # missing in Django's type stubs
        if not any(map(_Apart(copy, group, matched), fields)):
            raise refuse(
                "distinct() on fields in a prefetch",
                f"add the related row or the shard key to the fields, {_REMEDY}",
            )
    if isinstance(query.group_by, tuple | list) and not any(map(is_apart, query.group_by)):
        raise refuse("such groups in a prefetch", _REMEDY)


class _Apart:
    """Whether rows with equal values of an expression are all read by one of the statements."""

    def __init__(self, query: Query, group: str | None, matched: Sequence[Any]) -> None:
        self._query, self._matched = query, matched
        model: Any = query.model
        # A query that joins nothing may have no table before it is compiled.
        self._own_table = query.base_table or model._meta.db_table
        # The statements have rows of one shard each only if the rows are in the instances' group.
        self._group = group if group_of(model) == group else None

    def __call__(self, expression: Any) -> bool:
        if type(expression) is not Col:
            return False
        field: Any = expression.target
        if field.primary_key and expression.alias == self._own_table:
            return True
        if self._group is None or self._is_nullable(expression):
            return False
        options = shard_options(field.model)
        is_key = options is not None and options.names_shard(field)
        # A collation may treat different text keys as equal.
        is_text = is_key and isinstance(target_field(field), CharField | TextField)
        return (not is_text and bool(colocation_keys(field, self._group))) or self._is_about(
            expression
        )

    def _is_nullable(self, column: Col) -> bool:
        # NULL is a partition, too, and rows of several shards may have it.
        is_own = column.alias == self._own_table
        if column.target in self._matched and (is_own or column.target.model != self._query.model):
            return False
        table: Any = self._query.alias_map.get(column.alias)
        is_joined = table is not None and table.join_type != LOUTER
        if not column.target.null and (is_own or is_joined):
            return False
        return not any(
            column.alias == other.alias and column.target == other.target
            for lookup in required_conditions(self._query.where)
            if isinstance(lookup, In | Exact) or (isinstance(lookup, IsNull) and not lookup.rhs)
            for other in columns(lookup.lhs)
        )

    def _is_about(self, column: Col) -> bool:
        """Whether ``column`` has the id of a row of one model, to which a generic foreign key refers."""
        model: Any = column.target.model
        for field in model._meta.private_fields:
            if (
                getattr(field, "stays_on_shard", False)
                and getattr(field, "fk_field", None) == column.target.name
            ):
                type_field = model._meta.get_field(field.ct_field)
                if column.target in self._matched or any(
                    required_values(self._query, column.alias, type_field)
                ):
                    return True
        return False


def _parts(query: Query) -> Iterator[Any]:
    """Yield the expressions of ``query`` that may contain a window function, resolved."""
    for annotation in query.annotations.values():
        yield from parts_of(annotation)
    yield from parts_of(query.where)
    order: Any = query.order_by or (query.default_ordering and query.model._meta.ordering) or ()  # type: ignore[union-attr]  # the model is not None here
    for name in (*order, *query.extra_order_by):
        if isinstance(name, str):
            # A name of an annotation, which is checked above, or of a column; or SQL text.
            yield name
        elif any(isinstance(part, Window) for part in parts_of(name)):
            # The window is not resolved before the query is compiled.
            yield from parts_of(name.resolve_expression(query.chain(), allow_joins=True))
        else:
            yield from parts_of(name)


def _relation(model: Any, path: str) -> tuple[bool, Sequence[Any]]:
    """Follow a path of relations, as in ``prefetch_related()``.

    Return whether all of it leads to rows on the shard of the instances of ``model``. Also return the
    fields by which Django matches the rows at the end with instances, except primary keys.
    """
    group = group_of(model)
    matched: Sequence[Any] = ()
    for name in path.split(LOOKUP_SEP):
        descriptor: Any = getattr(model, name, None)
        if isinstance(descriptor, ForwardManyToOneDescriptor):
            model, matched = descriptor.field.remote_field.model, ()
        elif isinstance(descriptor, ReverseOneToOneDescriptor):
            model, matched = descriptor.related.related_model, (descriptor.related.field,)
        elif isinstance(descriptor, ManyToManyDescriptor):
            relation: Any = descriptor.rel
            to_many, through = relation.field, relation.through._meta
            if descriptor.reverse:
                model = relation.related_model
                matched = (through.get_field(to_many.m2m_reverse_field_name()),)
            else:
                model = relation.model
                matched = (through.get_field(to_many.m2m_field_name()),)
        elif isinstance(descriptor, ReverseManyToOneDescriptor):
            field: Any = descriptor.rel.field
            if hasattr(field, "object_id_field_name"):  # a generic relation
                model = descriptor.rel.model
                matched = (model._meta.get_field(field.object_id_field_name),)
            else:
                model, matched = descriptor.rel.related_model, (field,)
        else:
            return False, ()  # Such as a list that Prefetch(to_attr=…) has made.
        if group_of(model) != group:
            return False, ()
    return True, matched
