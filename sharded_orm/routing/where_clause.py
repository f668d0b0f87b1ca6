"""Finds the shards on which the rows of a query may be, by reading its where tree.

The result is a *bound*: a set of shards outside of which no row can match. An equality or an
``__in`` on a shard key has a bound. For example, the bound of ``user_id=7`` is the shard of the key
7. The bound of an AND is the intersection of the bounds of its conditions, and the bound of an OR
is their union. Negations and unknown conditions have no bound. A query without a bound is sent to
every shard if it has ``scatter()``. Otherwise, the caller refuses it. Shards are never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import Model
from django.db.models.expressions import Col, ColPairs, Expression, Value
from django.db.models.lookups import Exact, In, IsNull
from django.db.models.sql.where import AND, OR, XOR, NothingNode, WhereNode

from sharded_orm.exceptions import CrossShardRelation


@dataclass(frozen=True)
class ShardKey:
    """The group of a model, and the columns whose values determine the shard of a row.

    :param columns: maps the name of each such column to None if its values are shard keys. If its
        values are ids that contain the shard number, maps it to ``(shift, bits)``: for
        ``(46, 16)``, the number is in 16 bits, above the lowest 46 bits. If a foreign key refers to
        such a column of another model of the group, the foreign key's column is in ``columns``,
        too, and is mapped to the same value.
    """

    group: str
    columns: Mapping[str, tuple[int, int] | None]


# Matches the names of the methods by which lookups and expressions generate SQL. If a class of a
# project overrides such a method, its SQL is unknown.
_WRITES_SQL = re.compile(
    r"as_[a-z]+$|process_(lhs|rhs)$|(batch_process_rhs|get_rhs_op|select_format"
    r"|resolve_expression_parameter|get_bilateral_transforms)$"
)


def writes_own_sql(cls: type) -> bool:
    """Whether the body of the class ``cls`` defines a method that generates SQL, such as
    ``as_sql()``.

    False for the classes of Django and of this library, because their SQL is known.
    """
    if cls.__module__.partition(".")[0] in ("django", "sharded_orm"):
        return False
    return any(map(_WRITES_SQL.match, vars(cls)))


def compares_as(base: Any, lookup: Any) -> bool:
    """Whether ``lookup`` has the SQL of ``base``, a lookup class of Django, such as ``Exact``.

    False if ``lookup`` is not an instance of ``base``. Also False if its class derives from
    ``base`` but may have different SQL, for example because it overrides ``as_sql()``.
    """
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
    """Whether ``lookup`` is an equality or an ``__in``.

    If true, each row that matches has one of the given values in the compared column.
    """
    return compares_as(Exact, lookup) or compares_as(In, lookup)


#: A function that returns the :class:`ShardKey` of a model, or None if the model has no such key.
KeyOf = Callable[[type[Model]], ShardKey | None]
#: A function that receives the name of a group and a list of shard keys. It returns the shard
#: number of each key, as a dict. Keys that have no shard yet are left out.
Locate = Callable[[str, list[Any]], dict[Any, int]]
#: A function that receives a model, a field and a list of plain values. It returns the shard keys
#: of all rows with one of these values; the result may contain other keys, too. It returns None if
#: some of these shard keys may be unknown.
KeysOfRows = Callable[[type[Model], Any, list[Any]], Sequence[Any] | None]


class OnShard(Expression):
    """A condition that limits a query to the shard ``alias``.

    In the SQL for the shard ``alias``, the condition is always true. In the SQL for any other
    shard, it is always false.

    The library adds the condition to a comparison with an instance, for example ``album=album``.
    The SQL of this comparison contains only the primary key of the album, and another shard may
    have another album with the same primary key. Without the condition, that album would match.
    """

    conditional = True

    def __init__(self, alias: str, *, ids_are_unique: bool = False) -> None:
        super().__init__(output_field=_boolean())
        self.alias = alias
        #: True if no other row of any shard has the id of the instance. Then the comparison that
        #: this condition accompanies, such as ``album=album``, is right in the SQL for every shard.
        self.ids_are_unique = ids_are_unique

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        from django.core.exceptions import EmptyResultSet, FullResultSet

        here = getattr(connection, "shard", None)
        if getattr(connection, "stands_for_many", False):
            # This SQL is sent to several shards, so there is no single shard to compare with
            # ``alias``. The condition is true on each of the shards.
            here = None
        group, _, _ = self.alias.rpartition("_")
        if here is not None and here.group == group and here.alias != self.alias:
            # The class ``Colocation`` has refused most such statements before this call. But it
            # does not check querysets with using().
            if self.alias in _aliases_in_xor(compiler.query.where):
                raise self.refusal_in_xor()
            raise EmptyResultSet
        raise FullResultSet

    def refusal_in_xor(self) -> CrossShardRelation:
        return CrossShardRelation(
            f"An XOR compares with an instance that is on {self.alias!r}, and the query is not for this"
            " shard alone. Rows of other shards may have the same id. Remedy: compare with its primary"
            " key and its shard key, as in Q(album=album.pk, user_id=album.user_id); or filter the query"
            " so that it is for this shard only."
        )


def _aliases_in_xor(node: Any, *, is_in_xor: bool = False) -> Iterator[str]:
    """Yield the alias of each :class:`OnShard` condition that is in an XOR of the where tree."""
    if isinstance(node, WhereNode):
        for child in node.children:
            yield from _aliases_in_xor(child, is_in_xor=is_in_xor or node.connector == XOR)
    elif is_in_xor and isinstance(getattr(node, "lhs", None), OnShard):
        yield node.lhs.alias


class NoRow(NothingNode):
    """A condition that no row meets, at any place of a tree of conditions.

    Django puts its own NothingNode only on top of a tree. Below, it asks each condition of HAVING for
    columns to group by and for the annotations to which it refers, which a NothingNode cannot answer.
    """

    is_summary = False

    def get_group_by_cols(self) -> list[Any]:
        return []

    def get_refs(self) -> set[str]:
        return set()

    def replace_expressions(self, replacements: Any) -> NoRow:
        return self


class OnlyOnShard(OnShard):
    """A condition for a comparison with an instance inside of an expression.

    For example, in ``When(album=album, then=1)``, the SQL of the comparison contains only the
    primary key of the album, and another shard may have another album with this key. In a statement
    for the shard ``alias``, this condition is always true. A statement for another shard is
    refused.
    """

    def get_group_by_cols(self) -> list[Any]:
        return []

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        from django.core.exceptions import FullResultSet

        here = getattr(connection, "shard", None)
        # Refuse SQL for another shard or for many shards, because another row may have the
        # instance's id there. The class ``Colocation`` has refused most such statements before this
        # call. But it does not check querysets with using().
        if here is not None and here.group == self.alias.rpartition("_")[0]:
            is_for_many = getattr(connection, "stands_for_many", False)
            if here.alias != self.alias or is_for_many:
                raise self.refusal()
        raise FullResultSet

    def refusal(self) -> CrossShardRelation:
        return CrossShardRelation(
            "An expression such as When(), filter=, FilteredRelation() or a subquery compares with an instance"
            f" that is on {self.alias!r}, and the query is not for this shard alone. Rows of other shards"
            " may have the same id. Remedy: compare with its primary key and its shard key, as in"
            " When(album=album.pk, user_id=album.user_id); or filter the query so that it is for this"
            " shard only."
        )


def is_from_django(expression: Any) -> bool:
    """Whether the class of ``expression`` is Django's own, so that its SQL is known.

    A class of the project is not enough, even if it derives from ``Exact`` or ``In``, because its
    SQL may be different, such as ``<>`` or ``NOT IN``.
    """
    return type(expression).__module__.startswith("django.")


def _boolean() -> Any:
    from django.db.models import BooleanField

    return BooleanField()


@dataclass(frozen=True)
class Bound:
    """The numbers of the shards on which rows may match a condition.

    ``reason`` is a text such as ``Photo.user_id = 7``, which says why no other shard can have
    matching rows.
    """

    shards: frozenset[int]
    reason: str


class WhereReader:
    """Finds the shards of one query by reading its where tree. Not for use by several threads.

    :param group: the group of the query's model. Conditions on shard keys of other groups are
        ignored.
    :param resolve: a function that returns the shard number of an alias, or None if the alias is
        not in the group.
    :param embedded: ``(shift, bits)`` of the shard number in a key if the group's strategy reads
        the shard from the key; otherwise None.
    :param keys_of_rows: a function that finds the shard keys of rows by a column that is no shard
        key, for conditions such as ``photo.slug = 'sea'``. None (the default) if such conditions
        are ignored.
    """

    def __init__(
        self,
        query: Any,
        group: str,
        key_of: KeyOf,
        locate: Locate,
        resolve: Callable[[str], int | None],
        embedded: tuple[int, int] | None = None,
        keys_of_rows: KeysOfRows | None = None,
    ) -> None:
        self._keys_of_rows = keys_of_rows
        #: The number of conditions for which ``keys_of_rows`` has found the shards. If an OR has
        #: two such conditions, :meth:`_tree` does not use the results, because a row may have
        #: changed between the two calls.
        self._answered = 0
        self._query = query
        self._group = group
        self._key_of = key_of
        self._locate = locate
        self._resolve = resolve
        self._embedded = embedded

    def bound(self) -> Bound | None:
        """Return the shards that may have rows of the query; None if any shard may have rows."""
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
        answered = self._answered
        if node.connector == AND:
            bounds, certain = [], []
            for child in node.children:
                before = self._answered
                if (bound := self._node(child)) is not None:
                    bounds.append(bound)
                    if self._answered == before:
                        certain.append(bound)
            if certain:
                # One condition of this AND, such as user_id = 7, determines its shards without
                # ``keys_of_rows``. The rows cannot be on other shards, so this condition is enough.
                # Ignore the results of ``keys_of_rows`` for the other conditions, and do not count
                # its calls.
                self._answered = answered
            return _intersect(certain or bounds)
        if node.connector == OR and node.children:
            bounds = []
            for child in node.children:
                bound = self._node(child)
                # If ``keys_of_rows`` was called for two conditions of this OR, a row may have
                # changed between the calls. For example, the row matched only the second condition
                # during the first call, and only the first condition during the second call. Then
                # neither result contains its shard key. So return None (any shard).
                if bound is None or self._answered > answered + 1:
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
            # Django turns "= None" into IS NULL. A shard key is never NULL, so no row matches. But
            # if the column is a nullable foreign key, rows with NULL may be on any shard.
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
            return self._bound_of_rows(lookup)
        if keys is None:
            return None
        numbers = self._locate(self._group, keys)
        name = f"{column.target.model._meta.object_name}.{column.target.attname}"
        shown = ", ".join(map(repr, keys[:3])) + (", …" if len(keys) > 3 else "")
        reason = f"{name} = {shown}" if len(keys) == 1 else f"{name} in ({shown})"
        return Bound(frozenset(numbers.values()), reason)

    def _bound_of_rows(self, lookup: Any) -> Bound | None:
        column = lookup.lhs
        if (
            self._keys_of_rows is None
            or type(column) is not Col
            or column.alias != self._query.base_table
        ):
            return None
        ((_, compared),) = compared_columns(lookup) or ((column, None),)
        values = None if compared is None else plain_values(compared, column.target)
        if values is None:
            return None
        keys = self._keys_of_rows(self._query.model, column.target, values)
        if keys is None:
            return None
        self._answered += 1
        numbers = self._locate(self._group, list(keys)) if keys else {}
        name = f"{column.target.model._meta.object_name}.{column.target.attname}"
        return Bound(frozenset(numbers.values()), f"the keys of rows by {name} are known")

    def lists_keys(self, lookup: Any) -> bool:
        """Whether ``lookup`` is ``key IN (…)`` with a list of plain values.

        ``key`` is a column that determines the shard. If true, the list in the SQL for a shard can
        be reduced to the keys of that shard. Plain values are those that :func:`plain_values`
        accepts.
        """
        return (
            compares_as(In, lookup)
            and lookup.rhs_is_direct_value()
            and self.is_key(lookup.lhs)
            and not any(type(value) is Value for value in lookup.rhs)
            and plain_values(lookup.rhs, lookup.lhs.target) is not None
        )

    def is_key(self, lhs: Any) -> bool:
        """Whether ``lhs`` is a column whose values determine a shard of this query's group.

        The column may be in a joined table, because a row and the rows that are joined to it are on
        the same shard.
        """
        # Return False for a column of the outer query, if this query is a subquery. A condition on
        # such a column does not determine the shard of the subquery's rows.
        if type(lhs) is not Col or lhs.alias not in self._query.alias_map:
            return False
        model = lhs.target.model
        if lhs.alias == self._query.base_table:
            model = self._query.model
        key = self._key_of(model)
        column: Any = lhs.target.column
        if key is None or key.group != self._group or column not in key.columns:
            return False
        bits = key.columns[column]
        return bits is None or bits == self._embedded


def compared_columns(lookup: Any) -> Sequence[tuple[Any, Iterable[Any]]]:
    """Return a pair for each column that ``lookup`` compares: the column, and the compared values.

    For a composite primary key, there is one pair for each of its columns. If the values come from
    a subquery, they are unknown, and the result is empty. But if ``lookup`` is an equality of a
    single column with a subquery, the result is one pair: the column, and a tuple of the subquery.

    :param lookup: an equality or an ``__in``, for which :func:`is_equality` is true.
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
    """Return ``values`` without duplicates, or None if not all values are plain values.

    Plain values have the type that ``field`` stores; an expression, for example, is not plain. A
    None among the values is left out, because no row is equal to NULL.
    """
    plain = []
    for value in values:
        if type(value) is Value:
            # Django converts a value to the type of the field, but not a value inside Value(). The
            # database would convert such a value by its own rules: for MariaDB, "5abc" equals the
            # number 5. So a value inside Value() is plain only if it has the type of the field
            # already.
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
    """Whether ``values`` already have the types that ``prepare`` gives them.

    Django does not convert the values of some lookups. For example, in ``In(F("owner"), ["1"])``,
    the value stays a text although the column has numbers.

    :param prepare: the method ``get_prep_value()`` of the field with which the values are compared.
    """
    for kind, value in {type(value): value for value in values}.items():
        try:
            if type(prepare(value)) is not kind:
                return False
        except (TypeError, ValueError, ValidationError):
            # Ignore the error. The value may come from the database, and a field of a project may
            # be unable to prepare such a value.
            continue
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
