"""Finds the shards of a query. No other module decides where a query goes.

A *bound* of a query is a set of shards that contains every row that can match the query. (It has
nothing to do with the bound key.) A query without a bound is sent to all shards of its group if
``scatter()`` was called on it; otherwise it is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from django.db.models.expressions import Col
from django.db.models.lookups import Exact, In
from django.db.models.sql import Query
from django.db.models.sql.where import AND, WhereNode

from sharded_orm import runtime
from sharded_orm.exceptions import ScatterNotSupported
from sharded_orm.models.moves.scatter import keys_left_out
from sharded_orm.models.sharding import key_sources, ordering
from sharded_orm.models.sharding.colocation import Colocation
from sharded_orm.models.sharding.expressions import is_known, is_plain_value
from sharded_orm.models.sharding.key_errors import shard_key_required
from sharded_orm.models.sharding.options import ShardOptions, where_key
from sharded_orm.models.sharding.row_placement import colocated_alias
from sharded_orm.models.sharding.rows_of_keys import RowsOfKeys
from sharded_orm.routing.where_clause import (
    Bound,
    KeysOfRows,
    NoRow,
    OnShard,
    WhereReader,
    compares_as,
)
from sharded_orm.scatter import Target
from sharded_orm.topology.model import Shard, ShardGroup

# The alias of a default shard, or None. Queries whose conditions determine no shard are sent to it.
# If it is None, they are refused. It is set while Django validates an instance, because the check
# for unique values must query only the instance's shard.
_scope: ContextVar[str | None] = ContextVar("sharded_orm_scope", default=None)


@contextmanager
def scoped(alias: str) -> Iterator[None]:
    """Within the ``with`` block, send a query to ``alias`` if its conditions determine no shard.

    This applies only to the current context (:mod:`contextvars`).
    """
    token = _scope.set(alias)
    try:
        yield
    finally:
        _scope.reset(token)


def is_scoped() -> bool:
    """Whether the calling code runs inside a :func:`scoped` block, which sets a default shard."""
    return _scope.get() is not None


@dataclass(frozen=True)
class Route:
    """The shards to which a query is sent, and the reason.

    ``shards`` contains the numbers of these shards in ``group``, in ascending order. ``aliases``
    contains their Django aliases, and ``nodes`` the names of the primary database servers that have
    these shards. ``str(route)`` is a sentence for people.
    """

    group: str
    shards: tuple[int, ...]
    reason: str
    #: The alias passed to ``using()``, if it is not a shard of the group, such as the database that
    #: had the table before the model was sharded. Otherwise None.
    outside: str | None = None
    #: Whether the shards were found by a source of keys, such as a lookup table, which looks up the
    #: shard key by a value in another column. The query then has no condition on the shard key. So
    #: it may also match outdated rows, which a moved key has left on its old shard.
    by_values: bool = False
    #: Whether the rows of the query are read with a plan (SQL that was compiled once), as a phrase
    #: for people. It is not a part of the route, so routes are compared without it.
    plan: str = field(default="", compare=False)

    @property
    def aliases(self) -> tuple[str, ...]:
        if self.outside is not None:
            return (self.outside,)
        return tuple(shard.alias for shard in self._shards())

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(shard.node for shard in self._shards()))

    def _shards(self) -> list[Shard]:
        return _shards(runtime.group(self.group), self.shards) if self.shards else []

    def __str__(self) -> str:
        if self.outside is not None:
            return f"{self.outside!r}, which is no shard of group {self.group!r}, because {self.reason}"
        if not self.shards:
            return f"group {self.group!r}: no shard, the result is empty ({self.reason})"
        aliases = self.aliases
        shown = ", ".join(aliases[:4]) + (f" … {aliases[-1]}" if len(aliases) > 4 else "")
        return (
            f"group {self.group!r}: {len(aliases)} shard{'s' if len(aliases) > 1 else ''} ({shown})"
            f" on {', '.join(self.nodes)}, because {self.reason}"
        )


def _shards(group: ShardGroup, numbers: Iterable[int]) -> list[Shard]:
    return runtime.shards_in(group, numbers)


def find_route(
    options: ShardOptions,
    query: Query,
    hints: dict[str, Any],
    *,
    scatter: bool,
    ordered: bool = True,
    known_keys: KeysOfRows = key_sources.known_keys,
) -> tuple[Route, ShardGroup]:
    """Return the :class:`Route` of ``query`` (the shards to which it is sent), and the shard group.

    Cost: no query if the group's strategy computes shards. With the directory strategy, at most one
    query to the directory for each condition on the key. If no condition contains a key, the
    sources of keys (:mod:`sharded_orm.models.sharding.key_sources`) are also queried.

    :param options: the group and shard key of the query's model.
    :param hints: the hints of the queryset. If they contain an instance, its shard is used for a
        query whose conditions determine no shard.
    :param scatter: whether the query may go to all shards.
    :param ordered: True if the SQL will have an ORDER BY, so that its expressions must be checked.
        False for a count, for example.
    :param known_keys: the function that queries the sources of keys.
    :raises ShardKeyRequired: the query's conditions determine no shard, and the query may not go to
        all shards.
    :raises CrossShardRelation: the query reads rows that the shards to which it is sent may lack.
    :raises UnknownExpression: the library cannot know which rows an expression reads.
    """
    bound = _bound_of_combination(options, query) if query.combinator else _bound(options, query)
    if bound is None:
        bound = _bound_of_hints(options, hints)
    by_values = False
    if bound is None and not scatter and (bound := _bound_of_scope(options)) is None:
        bound = _bound_of_known_keys(options, query, known_keys)
        by_values = bound is not None
    shards = bound.shards if bound is not None else None
    colocation(options, shards).check(query, ordered=ordered)
    if bound is None and not scatter:
        problem = "this query does not say which shards it is about"
        raise shard_key_required(options, problem + key_sources.hint(options.model))
    # Read the group after the look-up of the keys. During the look-up, this process may have loaded
    # a newer topology with more shards, and a key may be on one of these.
    group = runtime.group(options.group)
    if bound is not None:
        numbers = tuple(sorted(bound.shards))
        return Route(group.name, numbers, bound.reason, by_values=by_values), group
    return Route(group.name, tuple(range(group.count)), "the query scatters"), group


def _bound_of_known_keys(
    options: ShardOptions, query: Query, known_keys: KeysOfRows
) -> Bound | None:
    if query.combinator or options.key is None or not key_sources.has_key_sources():
        return None
    return _reader(options, query, known_keys).bound()


def _bound_of_scope(options: ShardOptions) -> Bound | None:
    alias = _scope.get()
    shard = runtime.topology().resolve(alias) if alias is not None else None
    if shard is None or shard.group != options.group:
        return None
    return Bound(frozenset({shard.number}), f"it validates a row of {alias!r}")


def colocation(options: ShardOptions, shards: frozenset[int] | None) -> Colocation:
    """Return a :class:`Colocation` for statements that run on ``shards``.

    Its checks raise an error if a statement reads rows that may be stored on other shards.

    :param shards: shard numbers; None for all shards of the group.
    """

    def bound_of(query: Query) -> Bound | None:
        alias = getattr(query, "_db", None)
        number = _number_in(options.group)(alias) if alias is not None else None
        if number is not None:
            return Bound(frozenset({number}), f"using({alias!r}) names it")
        return _bound(options, query)

    return Colocation(options, options.group, shards, bound_of)


def colocation_on(options: ShardOptions, alias: str) -> Colocation:
    """Return a :class:`Colocation` for statements that run on the shard ``alias``.

    Its checks raise an error if a statement reads rows that may be stored on other shards.
    """
    shard = runtime.topology().resolve(alias)
    return colocation(options, frozenset({shard.number} if shard is not None else ()))


# The types of values that plain_key() accepts. Such a value is hashable and contains no expression.
PLAIN_KEYS = frozenset({int, str, UUID})


def only_shard(options: ShardOptions, query: Query, *, ordered: bool = True) -> Shard | None:
    """Return the shard of a query of the form ``key = value AND …``; None for any other query.

    Return None also if the key has no shard yet. If the result is None, call :func:`find_route`,
    which handles every form. This function is a shortcut for the commonest queries, and takes a
    fifth of the time.
    """
    value = plain_key(options, query, ordered=ordered)
    return None if value is None else runtime.locate(options.group, value)


def plain_key(options: ShardOptions, query: Query, *, ordered: bool = True) -> Any:
    """Return the value that determines the shard of a simple query; None for any other query.

    A simple query reads one table. Its conditions compare columns with plain values, and are joined
    by AND. One condition is an equality with the shard key, or with an id that contains its shard
    number. If there are several such equalities, they have the same value. Sends nothing.
    """
    if not has_one_table(query, ordered=ordered):
        return None
    key, value, columns = options.key, None, options.columns
    lookup: Any
    for lookup in query.where.children:
        if type(getattr(lookup, "lhs", None)) is not Col or not is_known(type(lookup)):
            return None
        field = lookup.lhs.target
        if not compares_as(Exact, lookup):
            # The condition is not an equality. If it compares a column with plain values, it can
            # only exclude rows, so it does not change the shard. Ignore it. The exception is __in
            # on a key column. If the list lacks the key, no row matches, and no shard is needed.
            if is_plain_value(lookup.rhs) and not (
                isinstance(lookup, In) and field.column in columns
            ):
                continue
            return None
        if field is key or (field.column in columns and options.names_shard(field)):
            # A second equality, for example of a related manager, must have the same value. With
            # two different values, the query is not simple.
            if value is not None and (type(value) is not type(lookup.rhs) or value != lookup.rhs):
                return None
            value = lookup.rhs
            if type(value) not in PLAIN_KEYS:
                return None
        elif hasattr(lookup.rhs, "resolve_expression"):
            return None
    return value


def has_one_table(query: Query, *, ordered: bool) -> bool:
    """Return whether ``query`` reads only one table, and joins its conditions by AND.

    The conditions are not examined. Sends nothing.
    """
    where = query.where
    return not (
        _joins(query)
        or query.combinator
        or query.annotations
        or query.select_related
        or query.extra
        or query.extra_tables
        or where.negated
        or where.connector != AND
        or ((ordered or query.distinct_fields) and not ordering.is_plain(query))
    )


def names_shards(options: ShardOptions, query: Query) -> bool:
    """Whether the conditions of ``query`` determine its shards, by keys, ids or instances."""
    return _bound(options, query) is not None


def _joins(query: Query) -> bool:
    # Count only joins with a reference. For filter(album_id=…), Django makes a join and then
    # removes it from the SQL. Such a join stays in alias_map with a reference count of 0.
    return len(query.alias_map) > 1 and any(
        query.alias_refcount[alias] for alias in query.alias_map if alias != query.base_table
    )


def _bound(options: ShardOptions, query: Query) -> Bound | None:
    return _reader(options, query).bound()


def _reader(
    options: ShardOptions, query: Query, keys_of_rows: KeysOfRows | None = None
) -> WhereReader:
    group = options.group
    embedded = runtime.strategy(group).embedded
    return WhereReader(query, group, where_key, _locate, _number_in(group), embedded, keys_of_rows)


def _locate(group: str, keys: list[Any]) -> dict[Any, int]:
    strategy = runtime.strategy(group)
    if len(keys) == 1:
        number = strategy.locate(keys[0])
        return {} if number is None else {keys[0]: number}
    return {key: n for key, n in strategy.locate_many(keys).items() if n is not None}


def _number_in(group: str) -> Any:
    def resolve(alias: str) -> int | None:
        shard = runtime.topology().resolve(alias)
        return shard.number if shard is not None and shard.group == group else None

    return resolve


def _bound_of_combination(options: ShardOptions, query: Query) -> Bound | None:
    """Return the bound of a union(), intersection() or difference().

    The bound is the set of shards that can have matching rows. Return None if one of the combined
    queries has no bound.

    :raises ScatterNotSupported: the combined queries together need more than one shard.
    """
    bounds = []
    for part in query.combined_queries:
        bound = _bound_of_combination(options, part) if part.combinator else _bound(options, part)
        if bound is None:
            return None
        bounds.append(bound)
    shards: frozenset[int] = frozenset().union(*(b.shards for b in bounds))
    if len(shards) > 1:
        raise ScatterNotSupported(
            f"{query.combinator}() over shards {sorted(shards)!r} of group {options.group!r} cannot be"
            " merged; combine the conditions with | in one query, or evaluate the parts one by one."
        )
    return Bound(shards, " and ".join(b.reason for b in bounds))


def _bound_of_hints(options: ShardOptions, hints: dict[str, Any]) -> Bound | None:
    instance = hints.get("instance")
    alias = None if instance is None else colocated_alias(options, instance)
    number = None if alias is None else _number_in(options.group)(alias)
    if number is None:
        return None
    return Bound(frozenset({number}), f"the related {instance.__class__.__name__} is on {alias!r}")


def targets(options: ShardOptions, group: ShardGroup, query: Query, route: Route) -> list[Target]:
    """Return each shard of ``route``, paired with the query to send to it.

    If ``query`` has a list of keys (``__in``), the query for a shard contains only the keys of that
    shard.

    While a key moves from one shard to another, both shards may have its rows. So that no row is
    read twice, the query for one of these shards excludes the rows of the key. This is not done if
    the query's own conditions on shard keys determine a single shard. These conditions already
    exclude the rows of all other keys.

    :param group: the shard group of ``options``.
    """
    shards = _shards(group, route.shards)
    if len(shards) < 2 and not route.by_values:
        return [Target(shard, query) for shard in shards]
    hidden = {
        number: RowsOfKeys(options.group, keys)
        for number, keys in keys_left_out(options.group).items()
    }
    reader = _reader(options, query)
    key_lists = [lookup.rhs for _, _, lookup in _key_lists(reader, query.where)]
    if not key_lists and not any(True for _ in _on_shards(query.where)):
        return [Target(shard, query, hidden.get(shard.number)) for shard in shards]
    keys = dict.fromkeys(key for keys in key_lists for key in keys if key is not None)
    numbers = _locate(options.group, list(keys)) if keys else {}
    return [
        Target(shard, _narrowed_query(reader, query, shard, numbers), hidden.get(shard.number))
        for shard in shards
    ]


def _on_shards(where: WhereNode) -> Iterator[tuple[WhereNode, int, OnShard]]:
    child: Any
    for position, child in enumerate(where.children):
        if isinstance(child, WhereNode):
            yield from _on_shards(child)
        elif isinstance(getattr(child, "lhs", None), OnShard):
            yield where, position, child.lhs


def _key_lists(reader: WhereReader, where: WhereNode) -> Iterator[tuple[WhereNode, int, Any]]:
    if where.negated or where.connector != AND:
        return
    child: Any
    for position, child in enumerate(where.children):
        if isinstance(child, WhereNode):
            yield from _key_lists(reader, child)
        elif reader.lists_keys(child):
            yield where, position, child


def _narrowed_query(
    reader: WhereReader, query: Query, shard: Shard, numbers: dict[Any, int]
) -> Query:
    """Return a copy of ``query`` whose lists of keys (``IN (…)``) contain only keys of ``shard``.

    If a condition compares with an instance on another shard, it matches no row in the copy.

    :param numbers: the shard number of each key. Keys that have no shard are left out.
    """
    narrowed = query.clone()
    for where, position, lookup in list(_key_lists(reader, narrowed.where)):
        own_lookup = copy.copy(lookup)
        own_lookup.rhs = [
            value
            for value in lookup.rhs
            if value is not None and numbers.get(value) == shard.number
        ]
        where.children[position] = own_lookup
    for where, position, condition in list(_on_shards(narrowed.where)):
        if condition.alias != shard.alias:
            where.children[position] = NoRow()
    return narrowed
