"""Finds, in a query's where tree, the shards that the query is about. Fails closed.

The result is a *bound*: a set of shards outside of which no row can match. Equality and ``__in``
on a shard key bound a query. AND intersects bounds, OR unites them. Negations and conditions that
are not understood have no bound. The caller refuses a query without a bound, or asks every shard
if the query has ``scatter()``. Shards are never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import Model
from django.db.models.expressions import Col, ColPairs, Expression, Value  # type: ignore[attr-defined]  # not in the stubs
from django.db.models.lookups import Exact, In, IsNull
from django.db.models.sql.where import AND, OR, NothingNode, WhereNode


@dataclass(frozen=True)
class ShardKey:
    """The group of a model, and the columns whose values name the shard of a row.

    ``columns`` maps the name of each such column to None or to ``(shift, bits)``. None: the column
    holds shard keys (it is the shard key, or a foreign key to one). ``(shift, bits)``: the column
    holds ids that carry their shard (or foreign keys to such ids), and these bits of an id are the
    shard number.
    """

    group: str
    columns: Mapping[str, tuple[int, int] | None]


# Methods of lookups and expressions that write SQL. The SQL of a project's class that overrides one
# is unknown.
_WRITES_SQL = re.compile(
    r"as_[a-z]+$|process_(lhs|rhs)$|(batch_process_rhs|get_rhs_op|select_format"
    r"|resolve_expression_parameter|get_bilateral_transforms)$"
)


def writes_own_sql(cls: type) -> bool:
    """Whether the body of ``cls`` has a method that writes SQL.

    False for classes of Django and of this library.
    """
    if cls.__module__.partition(".")[0] in ("django", "sharded_orm"):
        return False
    return any(map(_WRITES_SQL.match, vars(cls)))


def compares_as(base: Any, lookup: Any) -> bool:
    """Whether ``lookup`` matches the same rows as Django's lookup class ``base`` would."""
    kind: Any = type(lookup)
    return _is_same(base, kind)


@cache
def _is_same(base: Any, kind: Any) -> bool:
    return (
        issubclass(kind, base)
        and kind.lookup_name == base.lookup_name
        and not any(map(writes_own_sql, kind.__mro__))
    )


def is_equality(lookup: Any) -> bool:
    """Whether ``lookup`` matches only rows whose column is equal to its value, or to one of its values."""
    return compares_as(Exact, lookup) or compares_as(In, lookup)


#: A function that returns the :class:`ShardKey` of a model, or None if no column names a shard.
KeyOf = Callable[[type[Model]], ShardKey | None]
#: A function of a group and a list of keys. It returns the shard number of each key, by key; keys that
#: have no shard yet are left out.
Locate = Callable[[str, list[Any]], dict[Any, int]]


class OnShard(Expression):
    """A condition that bounds a query to the shard ``alias``.

    The library adds it to a comparison with an instance (``album=album``), because the primary key
    in the SQL does not name the instance's shard. In SQL for that shard the condition is always true.
    In SQL for another shard it is always false, because another row there may have the same id.
    """

    conditional = True

    def __init__(self, alias: str) -> None:
        super().__init__(output_field=_boolean())
        self.alias = alias

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, list[Any]]:
        from django.core.exceptions import EmptyResultSet, FullResultSet

        here = getattr(connection, "shard", None)
        if getattr(connection, "stands_for_many", False):
            # The statement is compiled for many shards at once. Conditions on other shards have been
            # removed already.
            here = None
        group, _, _ = self.alias.rpartition("_")
        if here is not None and here.group == group and here.alias != self.alias:
            raise EmptyResultSet
        raise FullResultSet


def is_from_django(expression: Any) -> bool:
    """Whether the class of ``expression`` is Django's own, so that its SQL is known.

    A class of a project may derive from ``Exact`` or ``In``, and yet write ``<>`` or ``NOT IN``.
    """
    return type(expression).__module__.startswith("django.")


def _boolean() -> Any:
    from django.db.models import BooleanField

    return BooleanField()


@dataclass(frozen=True)
class Bound:
    """The numbers of the shards whose rows a condition can match, and the reason as text."""

    shards: frozenset[int]
    reason: str


class WhereReader:
    """A reader of one query's where tree; finds the query's shards. Not for use by several threads.

    :param group: the group of the query's model; keys of other groups are ignored.
    :param resolve: a function that returns the shard number of an alias, or None if the alias is not
        in the group.
    :param embedded: ``(shift, bits)`` of the shard number in a key, if the group's strategy reads it
        there; otherwise None.
    """

    def __init__(
        self,
        query: Any,
        group: str,
        key_of: KeyOf,
        locate: Locate,
        resolve: Callable[[str], int | None],
        embedded: tuple[int, int] | None = None,
    ) -> None:
        self._query = query
        self._group = group
        self._key_of = key_of
        self._locate = locate
        self._resolve = resolve
        self._embedded = embedded

    def bound(self) -> Bound | None:
        """Return the bound of the whole query, or None if rows of any shard may match."""
        return self._node(self._query.where)

    def _node(self, node: Any) -> Bound | None:
        if isinstance(node, WhereNode):
            return self._tree(node)
        if isinstance(node, NothingNode):
            return Bound(frozenset(), "the query is empty by definition")
        if is_equality(node) or compares_as(IsNull, node):
            return self._lookup(node)
        if isinstance(node, OnShard):
            return self._on_shard(node)
        return None

    def _tree(self, node: WhereNode) -> Bound | None:
        if node.negated:
            return None
        if node.connector == AND:
            bounds = [b for b in map(self._node, node.children) if b is not None]
            return _intersect(bounds)
        if node.connector == OR and node.children:
            bounds = []
            for child in node.children:
                bound = self._node(child)
                if bound is None:
                    return None
                bounds.append(bound)
            return _unite(bounds)
        return None  # XOR

    def _on_shard(self, node: OnShard) -> Bound | None:
        number = self._resolve(node.alias)
        if number is None:
            return None
        return Bound(frozenset({number}), f"an instance that is on {node.alias!r}")

    def _lookup(self, lookup: Any) -> Bound | None:
        if isinstance(lookup.lhs, OnShard):
            return self._on_shard(lookup.lhs) if lookup.rhs is True else None
        if isinstance(lookup, In) and lookup.rhs_is_direct_value() and not lookup.rhs:
            return Bound(frozenset(), "a list of values is empty")
        if isinstance(lookup, IsNull):
            # Django turns "= None" into IS NULL. A shard key is never NULL, so no row matches. But a nullable
            # foreign key may name the shard too, and rows of any shard may have NULL there.
            is_never_null = (
                self.is_key(lookup.lhs)
                and lookup.lhs.alias == self._query.base_table
                and not lookup.lhs.target.null
            )
            return (
                Bound(frozenset(), "a shard key is never NULL")
                if is_never_null and lookup.rhs
                else None
            )
        for column, values in compared_columns(lookup):
            if self.is_key(column):
                keys = plain_values(values, column.target)
                break
        else:
            return None
        if keys is None:
            return None
        numbers = self._locate(self._group, keys)
        name = f"{column.target.model._meta.object_name}.{column.target.attname}"
        shown = ", ".join(map(repr, keys[:3])) + (", …" if len(keys) > 3 else "")
        reason = f"{name} = {shown}" if len(keys) == 1 else f"{name} in ({shown})"
        return Bound(frozenset(numbers.values()), reason)

    def lists_keys(self, lookup: Any) -> bool:
        """Whether ``lookup`` is ``key IN (…)`` with plain keys: each shard then needs only its own keys."""
        return (
            compares_as(In, lookup)
            and lookup.rhs_is_direct_value()
            and self.is_key(lookup.lhs)
            and not any(type(value) is Value for value in lookup.rhs)
            and plain_values(lookup.rhs, lookup.lhs.target) is not None
        )

    def is_key(self, lhs: Any) -> bool:
        """Whether ``lhs`` is a column whose values name a shard of this query's group.

        It may be a column of a joined table: a join never leaves the shard, so the key of the joined row
        names the shard of the query's row too.
        """
        # In a subquery, a column of the outer query does not limit the subquery's rows.
        if type(lhs) is not Col or lhs.alias not in self._query.alias_map:
            return False
        model = lhs.target.model
        if lhs.alias == self._query.base_table:
            model = self._query.model
        key = self._key_of(model)
        if key is None or key.group != self._group or lhs.target.column not in key.columns:
            return False
        bits = key.columns[lhs.target.column]
        return bits is None or bits == self._embedded


def compared_columns(lookup: Any) -> Sequence[tuple[Any, Iterable[Any]]]:
    """Return the left side of an equality or ``__in``, paired with the values it is compared with.

    A composite primary key gives one pair for each of its columns. The result is empty if ``__in``
    or a composite key is compared with a query.

    :param lookup: a lookup for which :func:`is_equality` is true.
    """
    lhs, is_list = lookup.lhs, isinstance(lookup, In)
    is_composite = isinstance(lhs, ColPairs)
    if (is_list or is_composite) and not lookup.rhs_is_direct_value():
        return ()
    values = lookup.rhs if is_list else (lookup.rhs,)
    if not is_composite:
        return ((lhs, values),)
    return [
        (column, _parts(values, position, column.target)) for position, column in enumerate(lhs)
    ]


def _parts(rows: Iterable[Any], position: int, field: Any) -> Iterator[Any]:
    return (field.get_prep_value(row[position]) for row in rows)


def plain_values(values: Iterable[Any], field: Any) -> list[Any] | None:
    """Return the distinct values, or None if one is not a plain value of the type ``field`` stores.

    An expression is not a plain value. A None in ``values`` is left out, because no row is equal to
    NULL.
    """
    plain = []
    for value in values:
        if type(value) is Value:
            # Django converts plain values with the field, but not the value inside Value(). The
            # database converts that one, and not as Python does: for MariaDB, "5abc" equals the number 5.
            unprepared, value = value.value, field.get_prep_value(value.value)
            if type(unprepared) is not type(value):
                return None
        if hasattr(value, "resolve_expression") or hasattr(value, "as_sql"):
            return None
        if value is None:
            continue
        if not isinstance(value, Hashable):
            return None
        plain.append(value)
    return list(dict.fromkeys(plain)) if are_prepared(plain, field.get_prep_value) else None


def are_prepared(values: Iterable[Any], prepare: Callable[[Any], Any]) -> bool:
    """Whether ``values`` have the types that ``prepare`` returns for them.

    Django does not prepare values that are compared with an expression: ``In(F("owner"), ["1"])``.

    :param prepare: the method ``get_prep_value()`` of the values' field.
    """
    for kind, value in {type(value): value for value in values}.items():
        try:
            if type(prepare(value)) is not kind:
                return False
        except (TypeError, ValueError, ValidationError):
            continue  # A field of a project may be unable to prepare a value that came from the database.
    return True


def _intersect(bounds: list[Bound]) -> Bound | None:
    if len(bounds) < 2:
        return bounds[0] if bounds else None
    shards = frozenset.intersection(*(b.shards for b in bounds))
    return Bound(shards, " and ".join(b.reason for b in bounds))


def _unite(bounds: list[Bound]) -> Bound:
    if len(bounds) == 1:
        return bounds[0]
    shards = frozenset().union(*(b.shards for b in bounds))
    return Bound(shards, " or ".join(b.reason for b in bounds))
