"""Which shards a query is about, read from its where tree. Fails closed.

The answer is a *bound*: no row outside the shards it names can match. Equality and
``__in`` on a shard key bound a query; conjunction intersects bounds, disjunction
unites them, negation and everything unknown is unbounded. What is unbounded is
refused by the caller or scattered on request, never guessed (DESIGN decision 4).
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
    """How a model's rows find their shard: the group, and the columns that tell it.

    ``columns`` maps the shard key, and foreign keys to one, to None; ids that carry their
    shard, and foreign keys to such, to where it is in them (shift and bits).
    """

    group: str
    columns: Mapping[str, tuple[int, int] | None]


# Methods by which a class of a project writes SQL that its sources do not show.
_WRITES_SQL = re.compile(
    r"as_[a-z]+$|process_(lhs|rhs)$|(batch_process_rhs|get_rhs_op|select_format"
    r"|resolve_expression_parameter|get_bilateral_transforms)$"
)


def writes_own_sql(cls: type) -> bool:
    """Whether ``cls`` itself, not a base of it, is outside of Django and writes SQL."""
    if cls.__module__.partition(".")[0] in ("django", "sharded_orm"):
        return False
    return any(map(_WRITES_SQL.match, vars(cls)))


def compares_as(base: Any, lookup: Any) -> bool:
    """Whether ``lookup`` is true of the same rows as one of the class ``base``, Django's own."""
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
    """Whether ``lookup`` is true only of rows that have the value, or one of the values."""
    return compares_as(Exact, lookup) or compares_as(In, lookup)


#: Tells the shard key of a model, or None for a model that is not sharded.
KeyOf = Callable[[type[Model]], ShardKey | None]
#: Numbers of the shards of some keys of a group; unplaced keys are left out.
Locate = Callable[[str, list[Any]], dict[Any, int]]


class OnShard(Expression):
    """A condition that is true of the rows of one shard only, and says so to the router.

    It stands beside a comparison with an instance (``album=album``): the instance's
    shard is where its co-located rows are, which its primary key alone does not tell.
    In the SQL of its shard it is no condition at all, and in that of another one always false:
    ids that count per shard repeat there.
    """

    conditional = True

    def __init__(self, alias: str) -> None:
        super().__init__(output_field=_boolean())
        self.alias = alias

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, list[Any]]:
        from django.core.exceptions import EmptyResultSet, FullResultSet

        here = getattr(connection, "shard", None)
        if getattr(connection, "stands_for_many", False):
            here = None  # The scatter has taken out what is of other shards.
        group, _, _ = self.alias.rpartition("_")
        if here is not None and here.group == group and here.alias != self.alias:
            raise EmptyResultSet
        raise FullResultSet


def is_from_django(expression: Any) -> bool:
    """Whether the class is Django's own, so that its SQL is known.

    One of a project may derive from ``Exact`` or ``In`` and write ``<>`` or ``NOT IN``.
    """
    return type(expression).__module__.startswith("django.")


def _boolean() -> Any:
    from django.db.models import BooleanField

    return BooleanField()


@dataclass(frozen=True)
class Bound:
    """The shards (by number) that a condition allows, and why."""

    shards: frozenset[int]
    reason: str


class WhereReader:
    """Reads one query's where tree. Not shared between threads.

    :param group: the group of the query's model; bounds of other groups do not count.
    :param embedded: where its strategy reads the shard from a key, if it does.
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
        """The bound of the whole query, or None when it may be about any shard."""
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
            # Django turns "= NULL" into IS NULL. The key of a row is never NULL; a
            # foreign key that tells the shard may be.
            own = (
                self.is_key(lookup.lhs)
                and lookup.lhs.alias == self._query.base_table
                and not lookup.lhs.target.null
            )
            return Bound(frozenset(), "a shard key is never NULL") if own and lookup.rhs else None
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
        """Whether ``lookup`` is ``key IN (…)`` with plain keys, of which a shard needs its own only."""
        return (
            compares_as(In, lookup)
            and lookup.rhs_is_direct_value()
            and self.is_key(lookup.lhs)
            and not any(type(value) is Value for value in lookup.rhs)
            and plain_values(lookup.rhs, lookup.lhs.target) is not None
        )

    def is_key(self, lhs: Any) -> bool:
        """Whether ``lhs`` is a column that tells the shard, of a model of this query's group.

        The column may belong to a joined table: a join never leaves the shard, so the
        joined row's key bounds the whole row.
        """
        # A column of an outer query says nothing of this one's rows.
        if type(lhs) is not Col or lhs.alias not in self._query.alias_map:
            return False
        model = lhs.target.model
        if lhs.alias == self._query.base_table:
            model = self._query.model
        key = self._key_of(model)
        if key is None or key.group != self._group or lhs.target.column not in key.columns:
            return False
        carried = key.columns[lhs.target.column]
        return carried is None or carried == self._embedded


def compared_columns(lookup: Any) -> Sequence[tuple[Any, Iterable[Any]]]:
    """What an equality or ``__in`` compares with values, and the values as they were given.

    That is its left side, or each part of a composite primary key. Empty if it compares with
    a query.

    :param lookup: see :func:`is_equality`.
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
    """The values as ``field`` prepares them, each once; None if one of them is no plain value.

    NULL is left out: no row is equal to it.
    """
    plain = []
    for value in values:
        if type(value) is Value:
            # Django prepares plain values only. The database would convert this one, and not
            # as Python does: to MariaDB, "5abc" is equal to the number 5.
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
    """Whether ``values`` are of the types that ``prepare``, of their field, gives.

    An expression is compared with values as they were given: ``In(F("owner"), ["1"])``.
    """
    for kind, value in {type(value): value for value in values}.items():
        try:
            if type(prepare(value)) is not kind:
                return False
        except (TypeError, ValueError, ValidationError):
            continue  # A field of the project that takes no value of the database.
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
