"""An index of entities: a table with values of their properties (FriendFeed, FF2, FF5).

The table is sharded by one of these properties, and is read in pages.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from django.db.models import Q
from django.utils.functional import cached_property

from sharded_orm import unbound
from sharded_orm.contrib.entities import declarations, index_states
from sharded_orm.contrib.entities.entity import Entity
from sharded_orm.contrib.entities.exceptions import (
    EntityDamaged,
    InvalidIndexCursor,
    InvalidIndexQuery,
    InvalidProperty,
)
from sharded_orm.contrib.entities.properties import clean_value, values_to_json
from sharded_orm.contrib.entities.tables import index_model
from sharded_orm.models.base import ShardedModel

if TYPE_CHECKING:
    from sharded_orm.contrib.entities.store import DataStore

#: The largest number of entities in a page.
MAX_LIMIT = 1000
#: The largest number of rows of an index that one query reads.
MAX_READ = 8000


@dataclass(frozen=True)
class EntityPage(Sequence[Entity]):
    """A part of the entities that an index returns for a query, in the order of the index.

    :param entities: the entities; as many as the caller asked for, unless the index has no more.
    :param after: the cursor of the next page; None if there is no next page. The next page may be
        empty, if all further rows of the index are stale because their entities have changed.
    :param damaged: the entities that were left out because their stored bodies cannot be read.
    """

    entities: list[Entity]
    after: str | None
    damaged: list[EntityDamaged] = field(default_factory=list)

    def __getitem__(self, at: Any) -> Any:
        return self.entities[at]

    def __len__(self) -> int:
        return len(self.entities)


class Index:
    """An index of a :class:`DataStore`: finds entities by their properties, in order.

    ::

        by_link = Index(feed, "index_link", properties=["link", "-published"], shard_on="link")
        page = by_link.get_all(link="https://example.org/", limit=20)

    An entity is in the index if it has all of ``properties``, with values other than None.

    :param store: the store, which declares fields for all of ``properties``.
    :param name: the name of the table, after the label of the app. Unique among the stores of the
        app.
    :param properties: the names of the properties, in the order by which the index sorts. "-"
        before a name sorts in descending order.
    :param shard_on: the property whose value decides on which shard a row is. Each query must name
        this property.
    :param unique: whether no two entities have equal values in all ``properties``.
    :param group: the group of the shards with the table; by default that of the store.
    :raises InvalidStore: the declaration cannot work.
    """

    def __init__(
        self,
        store: DataStore,
        name: str,
        properties: Sequence[str],
        shard_on: str,
        *,
        unique: bool = False,
        group: str | None = None,
    ) -> None:
        self.store = store
        self.name = name
        self.names = tuple(text.removeprefix("-") for text in properties)
        self.descending = tuple(text.startswith("-") for text in properties)
        self.shard_on = shard_on
        self.unique = unique
        self.group = group or store.group
        declarations.check_index(self, properties)
        self.model: type[ShardedModel] = index_model(self)
        store.indexes.append(self)

    @property
    def label(self) -> str:
        """The names of the store and the index, such as ``feed.index_user``."""
        return f"{self.store.name}.{self.name}"

    @cached_property
    def declaration(self) -> str:
        """A hash of the parts of the declaration that decide which rows the index has, and on which shards."""
        parts = (self.names, self.shard_on, self.group, self.unique)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @cached_property
    def fields(self) -> tuple[Any, ...]:
        """The fields of the properties, in their order."""
        return tuple(self.store.fields[name] for name in self.names)

    def values_of(self, properties: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Return the values that an entity's index row has; None if the index has no row for the
        entity.

        :param properties: the entity's properties, as the store holds them.
        """
        values = tuple(properties.get(name) for name in self.names)
        return None if None in values else values

    def is_current(self, entity: Entity, values: tuple[Any, ...]) -> bool:
        """Whether ``values`` are those that the entity's index row should have. If not, the row is stale."""
        return self.values_of(entity._stored) == values

    # ##### Reading #####

    def get_all(
        self, *, limit: int = 50, after: str | None = None, **properties: Any
    ) -> EntityPage:
        """Return a page of entities with these properties, in the order of the index (FriendFeed,
        FF5).

        Each entity is in the page at most once, with its present properties. A new entity may be
        missing for a moment, until its index row is written.

        :param limit: the number of entities, from 1 to 1000. The page has fewer only if the index
            has no more.
        :param after: the cursor of the previous page.
        :param properties: values of the first properties of the index, including the property
            ``shard_on``.
        :raises InvalidIndexQuery: the index cannot answer for these properties.
        :raises InvalidProperty: a value does not fit its field.
        :raises InvalidIndexCursor: ``after`` is not a cursor of a query with these properties.
        :raises IndexNotServed: the index is not built.
        :raises django.db.OperationalError: a shard does not answer. No part of a page is returned.

        Cost: one query of the index, and one round trip to each node (a database server) that has
        entities of the page. With ``after``, there may be one more query of the index for each
        property without a given value. If index rows are stale, all this is repeated. Every few
        seconds, there is one query of the global database.
        """
        equal = self._equal(properties)
        if not isinstance(limit, int) or not 1 <= limit <= MAX_LIMIT:
            raise InvalidIndexQuery(f"limit={limit!r}: it must be from 1 to {MAX_LIMIT}.")
        position = None if after is None else self._position(len(equal), after)
        index_states.require_served(self)
        entities: list[Entity] = []
        damaged: list[EntityDamaged] = []
        # The ids of the entities in the page so far, so that no entity is in the page twice. If an
        # entity is changed between two queries of the index, both may return a row of it.
        ids: set[Any] = set()
        for row, state in self._states(equal, position, limit):
            if len(entities) == limit:
                return EntityPage(entities, self._cursor(len(equal), position), damaged)
            position = row
            if state is None or row[-1] in ids:
                continue
            ids.add(row[-1])
            if isinstance(state, EntityDamaged):
                damaged.append(state)
            else:
                entities.append(state)
        return EntityPage(entities, None, damaged)

    def _equal(self, properties: Mapping[str, Any]) -> dict[str, Any]:
        names = self.names[: len(properties)]
        if self.shard_on not in properties or {*names} != {*properties}:
            first = self.names[: self.names.index(self.shard_on) + 1]
            raise InvalidIndexQuery(
                f"Index {self.label!r} has the properties {list(self.names)!r}, and cannot find entities by"
                f" {sorted(properties)!r}. Name its first properties, at least {list(first)!r}, or declare"
                " another index."
            )
        equal = {}
        for name in names:
            if properties[name] is None:
                raise InvalidProperty(
                    f"{name}=None: an entity without the property {name!r} is not in index {self.label!r}."
                )
            equal[name] = clean_value(self.store.fields[name], name, properties[name])
        return equal

    def _states(
        self, equal: Mapping[str, Any], position: tuple[Any, ...] | None, limit: int
    ) -> Iterator[tuple[tuple[Any, ...], Entity | EntityDamaged | None]]:
        """Yield the rows of the index after ``position``, each with its entity.

        The entity is None if the row is stale: the entity was deleted, or its properties have
        changed.
        """
        size = limit + 1
        while True:
            found = self._read(equal, position, size)
            entities = self.store.load({row[-1]: key for row, key in found})
            for row, _ in found:
                state = entities.get(row[-1])
                if isinstance(state, Entity) and not self.is_current(state, row[:-1]):
                    state = None
                yield row, state
                position = row
            if len(found) < size:
                return
            # The caller needs more rows, so many of these were stale, because their entities have
            # changed. Read on in larger steps.
            size = min(2 * size, MAX_READ)

    def _read(
        self, equal: Mapping[str, Any], position: tuple[Any, ...] | None, size: int
    ) -> list[tuple[tuple[Any, ...], Any]]:
        """Return the next ``size`` rows of the index after ``position``.

        Each item is a pair: the row (values of the properties, and the id of the entity), and the
        shard key of the entity.
        """
        rest = len(equal)
        names = (*self.names, "entity_id")
        descending = (*self.descending, self.descending[-1])
        order = [f"-{n}" if d else n for n, d in zip(names, descending, strict=True)]
        key_name = self.store.key_name_in_indexes
        # Do not select the key column twice: a query that names a column twice is compiled each
        # time (see docs/explanation/read-plans.md).
        columns = names if key_name in names else (*names, key_name)
        at = columns.index(key_name)
        found: list[tuple[Any, ...]] = []
        for condition in _ranges_behind(
            names[rest:], descending[rest:], position and position[rest:]
        ):
            with unbound():
                rows: Any = self.model._default_manager.filter(**equal, **condition)
                rows = rows.order_by(*order[rest:]).values_list(*columns)
                found += rows[: size - len(found)]
            if len(found) == size:
                break
        return [(row[: len(names)], row[at]) for row in found]

    # ##### Cursors #####

    def _cursor(self, rest: int, position: tuple[Any, ...] | None) -> str:
        assert position is not None
        text = json.dumps(values_to_json(position[rest:]), separators=(",", ":"))
        return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")

    def _position(self, rest: int, cursor: str) -> tuple[Any, ...]:
        fields = (*self.fields[rest:], self.model._meta.get_field("entity_id"))
        names = (*self.names[rest:], "entity_id")
        try:
            values = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
            if not isinstance(values, list) or None in values:
                raise ValueError("no list of values")
            cleaned = [clean_value(*each) for each in zip(fields, names, values, strict=True)]
            return (*(None,) * rest, *cleaned)
        except (ValueError, TypeError, RecursionError) as exc:
            raise InvalidIndexCursor(
                f"after={cursor!r} is no cursor of a page of index {self.label!r} with these properties."
            ) from exc


def _ranges_behind(
    names: Sequence[str], descending: Sequence[bool], position: Sequence[Any] | None
) -> Iterator[dict[str, Any]]:
    """Yield the conditions of the queries that read on after the row at ``position``.

    For example, the rows after ``(a=1, b=2)`` are those with ``a=1, b__gt=2``, and then those with
    ``a__gt=1``. Two simple queries are used instead of one with OR: simple queries are compiled
    only once (they have a plan), and compiling an OR each time would take longer than the second
    query.

    :param names: the columns by which the rows are sorted.
    :param descending: for each column, whether it is sorted in descending order.
    :param position: the values of ``names`` in the last row that was read; None to read from the
        first row.
    """
    if position is None:
        yield {}
        return
    for last in reversed(range(len(names))):
        equal = dict(zip(names[:last], position, strict=False))
        yield equal | {f"{names[last]}__{'lt' if descending[last] else 'gt'}": position[last]}


def follows(names: Sequence[str], descending: Sequence[bool], position: Sequence[Any]) -> Q:
    """Return one condition, with OR, for the rows that are sorted after ``position``.

    :param names: the columns by which the rows are sorted.
    :param descending: for each column, whether it is sorted in descending order.
    :param position: the values of ``names`` in the last row that was read.
    """
    # ``condition`` alone would be enough for a correct result. ``bound`` makes it faster: with it,
    # the database begins to read its index at the first wanted row. Without it, some databases
    # would read all rows from the beginning.
    bound = Q(**{f"{names[0]}__{'lte' if descending[0] else 'gte'}": position[0]})
    condition, same = Q(), Q()
    for name, descends, value in zip(names, descending, position, strict=True):
        condition |= same & Q(**{f"{name}__{'lt' if descends else 'gt'}": value})
        same &= Q(**{name: value})
    return bound & condition
