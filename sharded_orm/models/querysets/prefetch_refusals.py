"""Refuses prefetches whose results would be wrong because the instances are on several shards.

If all instances are in one database, a prefetch is one statement for all of them. If they are on
several shards, it is one statement for each shard. The related rows of an instance are all on its
shard, so one statement reads all of them. So most querysets of a ``Prefetch`` give the same results
as in one database:

- conditions, joins, orders and columns
- aggregates, because Django computes them for each row
- ``distinct()`` without fields, because it compares whole rows, with their primary keys
- slices, because Django counts the rows of each instance separately
- subqueries, which :class:`~sharded_orm.models.sharding.colocation.Colocation` checks

But some querysets compute a value from rows of several instances, for example the rank of a photo
among the photos of all users. One shard does not have all these rows. Refused are:

- window functions, unless all rows of a partition are on one shard
- ``distinct("stars")``, unless all rows with the same value are on one shard
- a GROUP BY whose groups have several rows, which only private methods can give to a queryset of
  instances
- ``union()``, ``intersection()`` and ``difference()``: Django does not limit their parts to the
  instances, so each shard would return the rows of all instances
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
    :param inside: True if each statement of the prefetch is for all instances of one shard. False
        for lookups inside of a lookup that leads to another group. A statement can then be for
        instances on several shards.
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
    :param group: the shard group of the instances, if the related rows are on the shards of their
        instances. None if the related rows may be anywhere.
    :param matched: fields by which Django assigns the rows to instances, such as the foreign key.
        ``query`` has no condition on these fields yet, but Django will add one. So they are never
        NULL in the result.
    :raises ScatterNotSupported: the query uses rows of several shards for one value.
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
        fields = [copy.resolve_ref(name, allow_joins=True) for name in query.distinct_fields]
        if not any(map(_Apart(copy, group, matched), fields)):
            raise refuse(
                "distinct() on fields in a prefetch",
                f"add the related row or the shard key to the fields, {_REMEDY}",
            )
    if isinstance(query.group_by, tuple | list) and not any(map(is_apart, query.group_by)):
        raise refuse("such groups in a prefetch", _REMEDY)


class _Apart:
    """A function that tells whether rows with equal values of an expression are all on one shard.

    For example, it returns True for an integer shard key, and for a foreign key to rows of the same
    group. It returns False for a number of stars, because photos on all shards may have the same
    number.
    """

    def __init__(self, query: Query, group: str | None, matched: Sequence[Any]) -> None:
        self._query, self._matched = query, matched
        model: Any = query.model
        # Before the query is compiled, it may have no base_table.
        self._own_table = query.base_table or model._meta.db_table
        # Related rows of another group are not on the shards of the instances.
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
        # A text key does not count. A collation may treat different keys as equal, such as "a" and
        # "A", and these keys may be on different shards.
        is_text = is_key and isinstance(target_field(field), CharField | TextField)
        return (not is_text and bool(colocation_keys(field, self._group))) or self._is_about(
            expression
        )

    def _is_nullable(self, column: Col) -> bool:
        # Rows on several shards may have NULL in the column. Windows and groups treat two NULLs as
        # equal, so these rows are one partition, which no shard has as a whole.
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
        """Return whether ``column`` is the object id of a generic foreign key whose content type
        is the same in all rows that the query finds.

        It is the same if the query has a condition on the content type, or if Django will add one.
        Then rows with equal object ids refer to the same row, and are on its shard.
        """
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
    """Yield the expressions of ``query`` that may contain a window function."""
    for annotation in query.annotations.values():
        yield from parts_of(annotation)
    yield from parts_of(query.where)
    order: Any = query.order_by or (query.default_ordering and query.model._meta.ordering) or ()  # type: ignore[union-attr]  # the model is not None here
    for name in (*order, *query.extra_order_by):
        if isinstance(name, str):
            # A string is the name of a column or of an annotation, or SQL text of extra(). Yield
            # it, because SQL text may contain a window. (The expression of an annotation was
            # yielded above.)
            yield name
        elif any(isinstance(part, Window) for part in parts_of(name)):
            # Resolve the window, so that names of columns in it are replaced by column expressions.
            yield from parts_of(name.resolve_expression(query.chain(), allow_joins=True))
        else:
            yield from parts_of(name)


def _relation(model: Any, path: str) -> tuple[bool, Sequence[Any]]:
    """Follow a path of relations, such as ``"album__tags"`` in ``prefetch_related()``.

    Return a pair. The first item is True if all rows on the path are on the shard of the instances.
    The second is a sequence of the fields by which Django assigns the rows at the end of the path
    to instances, such as the foreign key. Primary keys are left out.

    :param model: the model of the instances.
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
