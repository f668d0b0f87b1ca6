"""A store of entities, dicts of properties without a schema (FriendFeed, FF1, FF3, FF4)."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any
from uuid import UUID

from django.db import IntegrityError, connections, router, transaction
from django.db.models import F
from django.utils import timezone
from django.utils.functional import cached_property

import sharded_orm
from sharded_orm import unbound
from sharded_orm.contrib.entities import declarations, index_rows, index_states, reservations
from sharded_orm.contrib.entities.entity import Entity, as_uuid
from sharded_orm.contrib.entities.entity_rows import entity_rows
from sharded_orm.contrib.entities.exceptions import (
    EntityChanged,
    EntityDamaged,
    EntityExists,
    EntityNotFound,
    EntityTooLarge,
    FormerRowsFull,
    InvalidEntity,
    InvalidProperty,
)
from sharded_orm.contrib.entities.index import Index
from sharded_orm.contrib.entities.index_rows import IndexRow
from sharded_orm.contrib.entities.pending_rows import has_room, with_rows
from sharded_orm.contrib.entities.properties import clean, clean_value, decode, encode, shown
from sharded_orm.contrib.entities.tables import entity_model
from sharded_orm.exceptions import ShardKeyChanged, ShardKeyRequired
from sharded_orm.models.base import ShardedModel
from sharded_orm.models.moves.repetition import repeated

#: The largest number of entities that one query reads.
BATCH = 500
#: All stores, by name.
stores: dict[str, DataStore] = {}


class DataStore:
    """A store of entities, sharded by their ids or by a property.

    ::

        feed = DataStore(
            "feed",
            group="feeds",
            fields={"user_id": models.BigIntegerField(), "published": models.DateTimeField()},
        )

    Declare it in the ``models`` module of an app. Its tables belong to that app: ``makemigrations``
    sees them, and ``migrate_shards`` creates them.

    :param name: the name, unique in the project. It is part of the name of the table.
    :param group: the shard group.
    :param fields: the fields of the properties that indexes use, by name. Allowed are fields for
        integers, booleans, dates, times and UUIDs, and ``ExactCharField``. Other properties need no
        declaration.
    :param shard_on: the property whose value decides on which shard an entity is; by default, the
        id decides. Each entity must have the property, and its value must never change. Reads by id
        must also pass this value.
    :param max_body: the largest compressed body in bytes. A server has to accept a packet of twice
        the size (``max_allowed_packet``).
    :param module: the name of the module that declares the store; by default, the calling module.
    :raises InvalidStore: the declaration cannot work.

    Thread-safe. Methods that write may be called inside of a transaction. The index rows are then
    written after its commit.
    """

    def __init__(
        self,
        name: str,
        *,
        group: str,
        fields: Mapping[str, Any],
        shard_on: str | None = None,
        max_body: int = 1_000_000,
        module: str | None = None,
    ) -> None:
        self.name = name
        self.group = group
        self.fields = dict(fields)
        self.shard_on = shard_on
        self.max_body = max_body
        # namedtuple() finds the module of its caller in the same way.
        self.module: str = module or sys._getframe(1).f_globals["__name__"]
        self.indexes: list[Index] = []
        other = stores.get(name)
        declarations.check_store(self, None if other is None else other.module)
        self.model: type[ShardedModel] = entity_model(self)
        stores[name] = self

    @property
    def key_name(self) -> str:
        """The column of the entities' table that is the shard key."""
        return self.shard_on or "id"

    @property
    def key_name_in_indexes(self) -> str:
        """The name of the column, in tables of indexes, that holds the shard key of the entity."""
        return self.shard_on or "entity_id"

    @cached_property
    def _names(self) -> tuple[str, ...]:
        own = () if self.shard_on is None else (self.shard_on,)
        return ("id", "added_id", "updated", "version", "body", *own)

    # ##### Reading #####

    def get(self, id: UUID | str, **key: Any) -> Entity:
        """Return the entity with this id. One query.

        :param key: the property ``shard_on`` with its value, such as ``user_id=7``; nothing if the
            store has no ``shard_on``.
        :raises EntityNotFound: the store has no such entity.
        :raises EntityDamaged: the stored body of the entity cannot be read.
        :raises ShardKeyRequired: ``key`` is missing, or names another property.
        """
        id = as_uuid(id)
        entity = self.load({id: self._key(id, key)}).get(id)
        if entity is None:
            raise self._not_found(id, key)
        if isinstance(entity, EntityDamaged):
            raise entity
        return entity

    def get_many(self, ids: Iterable[UUID | str], **key: Any) -> dict[UUID, Entity]:
        """Return a dict of the entities with these ids, by id. Ids without an entity are left out.

        Costs a round trip to each node (a database server) for 500 ids.

        :param key: the property ``shard_on`` with its value, such as ``user_id=7``; nothing if the
            store has no ``shard_on``.
        :raises EntityDamaged: the stored body of an entity cannot be read. The error's attribute
            ``others`` has the entities that can be read.
        """
        states = self.load({id: self._key(id, key) for id in map(as_uuid, ids)})
        entities = {id: state for id, state in states.items() if isinstance(state, Entity)}
        for state in states.values():
            if isinstance(state, EntityDamaged):
                state.others = entities
                raise state
        return entities

    def load(self, keys: Mapping[UUID, Any]) -> dict[UUID, Entity | EntityDamaged]:
        """Return the entities with these ids and shard keys, or errors if they cannot be read.

        Costs one round trip to each node (a database server) per 500 ids.
        """
        states: dict[UUID, Entity | EntityDamaged] = {}
        remaining = iter(keys.items())
        while batch := dict(islice(remaining, BATCH)):
            for row in entity_rows(self, batch, self._names):
                entity_id, body = row[0], row[4]
                if body and (self.shard_on is None or batch[entity_id] == row[-1]):
                    states[entity_id] = self._entity(row)
        return states

    def _entity(self, row: tuple[Any, ...]) -> Entity | EntityDamaged:
        entity_id, added_id, updated, version, body = row[:5]
        try:
            properties = decode(self.fields, bytes(body))
        except ValueError as exc:
            return EntityDamaged(
                f"The body of entity {entity_id} in store {self.name!r} is damaged: {exc}. Restore it from a"
                " backup, or delete the entity.",
                entity_id,
            )
        entity = Entity(properties, id=entity_id)
        entity.added_id, entity.updated, entity.version = added_id, updated, version
        entity._stored = self._declared(properties)
        return entity

    def declared(self, body: bytes) -> dict[str, Any]:
        """Return the declared properties in a stored body.

        :raises ValueError: the body is damaged.
        """
        return self._declared(decode(self.fields, body))

    def _declared(self, properties: Mapping[str, Any]) -> dict[str, Any]:
        return {name: properties.get(name) for name in self.fields}

    def _key(self, id: UUID, key: Mapping[str, Any]) -> Any:
        if self.shard_on is None and not key:
            return id
        if self.shard_on is None or {*key} != {self.shard_on}:
            wanted = "the id" if self.shard_on is None else f"the id and {self.shard_on}=…"
            raise ShardKeyRequired(
                f"Store {self.name!r} finds an entity by {wanted}, and was given {sorted(key)!r}."
            )
        if key[self.shard_on] is None:
            raise ShardKeyRequired(f"Store {self.name!r} has no entity with {self.shard_on}=None.")
        return clean_value(self.fields[self.shard_on], self.shard_on, key[self.shard_on])

    def _not_found(self, id: UUID, key: Mapping[str, Any]) -> EntityNotFound:
        under = "".join(f" under {name}={value!r}" for name, value in key.items())
        return EntityNotFound(f"Store {self.name!r} has no entity {id}{under}.")

    # ##### Writing #####

    def put(self, entity: Entity) -> Entity:
        """Store ``entity``, and return it (FriendFeed, FF4).

        The entity is written first, in one local transaction on its shard. Then new index rows are
        written on their own shards, but only after the commit if the caller is in a transaction. If
        such a shard does not answer, the cleaner writes the row later. Only the row of a unique
        index is written before the entity. If that row cannot be written, the entity is not stored.
        Reads skip the index rows of earlier properties, until the cleaner removes them.

        :raises EntityExists: the entity is new, and the store has one with its id. A transaction of
            the caller on the shard can only be rolled back then.
        :raises EntityChanged: others have changed or deleted the entity since it was read.
        :raises InvalidEntity: ``entity`` is no :class:`Entity`, or was read from another store.
        :raises InvalidProperty: a property cannot be stored.
        :raises EntityTooLarge: the body is larger than ``max_body``.
        :raises FormerRowsFull: the entity was changed so often since the cleaner came that no more
            of its former index rows can be noted.
        :raises ShardKeyChanged: the property ``shard_on`` of a stored entity has another value.
        :raises UniqueValueTaken: another entity has the values of a unique index, or loses them in
            a transaction that is not committed yet.
        :raises ReservationRefused: a transaction of the caller is open on the shard of a row of a
            unique index, and is not committed together with the entity.

        Costs:

        - one statement for the entity
        - for each index whose properties have changed, one statement, or two if the entity was
          stored before
        - two more for each unique index
        - two more if all this takes longer than 0.2 seconds

        If an error is raised, nothing is written. If the caller's transaction is rolled back later,
        ``entity`` still has the state of a stored entity, so read it again.
        """
        if not isinstance(entity, Entity):
            raise InvalidEntity(f"{shown(entity)} is no Entity, as Entity(user_id=7) is.")
        cleaned = clean(self.fields, entity)
        body = self._body(entity, cleaned)
        stored = self._declared(cleaned)
        self._check_key(entity, stored)
        key = stored[self.shard_on] if self.shard_on is not None else entity.id
        changed = self._changed_indexes(entity, stored)
        former = [(index, index.values_of(entity._stored)) for index in changed]
        version = entity.version + 1
        now, marked_at = timezone.now(), time.monotonic()
        new_rows = [
            (index, IndexRow(values, entity.id, key, version))
            for index in changed
            if (values := index.values_of(stored)) is not None
        ]
        unique_rows = [(index, row) for index, row in new_rows if index.unique]
        rows = [(index, row) for index, row in new_rows if not index.unique]
        with unbound():
            # Look up the shard before the entity is written. If the lookup failed later, put()
            # would raise an error although the entity was written.
            alias = self.alias_of(entity.id, key) if rows else ""

        def write() -> None:
            if entity.version:
                self._update(entity, body, former, now)
            else:
                self._insert(entity, stored, body, now, is_marked=bool(changed))

        with unbound():
            if unique_rows:
                reservations.write_reserved(self, unique_rows, write)
            else:
                write()
        entity.update(cleaned)
        entity.version, entity.updated = version, now
        entity._stored = stored
        if rows:
            transaction.on_commit(partial(index_rows.follow, rows, marked_at), using=alias)
        return entity

    def _changed_indexes(self, entity: Entity, stored: Mapping[str, Any]) -> list[Index]:
        return [
            index
            for index in self.indexes
            if (not entity.version or index.values_of(stored) != index.values_of(entity._stored))
            and index_states.is_written(index)
        ]

    def _insert(
        self, entity: Entity, stored: Mapping[str, Any], body: bytes, now: Any, *, is_marked: bool
    ) -> None:
        row = self._row(entity.id, stored, version=1, body=body, updated=now)
        row.marked_at = now if is_marked else None
        try:
            row.save(force_insert=True)
        except IntegrityError as exc:
            raise EntityExists(
                f"Store {self.name!r} has an entity {entity.id} already. To change it, read it first, or use"
                " edit()."
            ) from exc
        entity.added_id = row.added_id

    def _update(
        self,
        entity: Entity,
        body: bytes,
        former: Sequence[tuple[Index, tuple[Any, ...] | None]],
        now: Any,
    ) -> None:
        changes: dict[str, Any] = {"version": entity.version + 1, "updated": now, "body": body}
        if former:
            changes.update(marked_at=now, pending=with_rows(former))
        # Compare the time as well as the version. Another writer may have stored other properties
        # with the same version, if this entity was put in a transaction that was rolled back.
        rows = self._rows(entity.id, entity._stored)
        rows = rows.filter(version=entity.version, updated=entity.updated)
        if not (rows.filter(has_room()) if former else rows).update(**changes):
            if former and rows.exists():
                raise self._full(entity.id)
            raise EntityChanged(
                f"Entity {entity.id} of store {self.name!r} was changed or deleted by others since its version"
                f" {entity.version} was read. Read it again, or use edit()."
            )

    def _full(self, id: UUID) -> FormerRowsFull:
        return FormerRowsFull(
            f"Entity {id} of store {self.name!r} has too many index rows of former versions, which the cleaner"
            " has not removed yet. Run 'manage.py entities clean', and write the entity again."
        )

    def _row(self, id: UUID, stored: Mapping[str, Any], **columns: Any) -> Any:
        return self.model(**self._condition(id, stored), **columns)

    def _rows(self, id: UUID, stored: Mapping[str, Any]) -> Any:
        return self.model._default_manager.filter(**self._condition(id, stored))

    def row_of(self, added_id: int, key: Any) -> Any:
        """Return a queryset of the entity with the primary key ``added_id``, on the shard of ``key``."""
        return self.model._default_manager.filter(**{self.key_name: key}, pk=added_id)

    def alias_of(self, id: UUID, key: Any) -> str:
        """Return the alias of the shard to which the entity with this id and shard key belongs."""
        stored = {} if self.shard_on is None else {self.shard_on: key}
        return router.db_for_write(self.model, instance=self._row(id, stored))

    def _condition(self, id: UUID, stored: Mapping[str, Any]) -> dict[str, Any]:
        if self.shard_on is None:
            return {"id": id}
        return {"id": id, self.shard_on: stored[self.shard_on]}

    def _body(self, entity: Entity, cleaned: Mapping[str, Any]) -> bytes:
        if wrong := sorted(str(name) for name in cleaned if not isinstance(name, str)):
            raise InvalidProperty(f"Names of properties must be text, and {wrong!r} are not.")
        body = encode(self.fields, cleaned)
        if len(body) > self.max_body:
            raise EntityTooLarge(
                f"The body of entity {entity.id} has {len(body)} bytes, and store {self.name!r} takes"
                f" {self.max_body}. Store large values elsewhere, or raise max_body and max_allowed_packet."
            )
        return body

    def _check_key(self, entity: Entity, stored: Mapping[str, Any]) -> None:
        if self.shard_on is None:
            return
        value = stored[self.shard_on]
        if value is None:
            raise ShardKeyRequired(
                f"Store {self.name!r} is sharded by {self.shard_on!r}, which entity {entity.id} does not have."
            )
        if entity.version and self.shard_on not in entity._stored:
            raise InvalidEntity(
                f"Entity {entity.id} was read from another store than {self.name!r}. Put a new Entity with its"
                " properties."
            )
        if entity.version and value != entity._stored[self.shard_on]:
            raise ShardKeyChanged(
                f"Entity {entity.id} has {self.shard_on}={entity._stored[self.shard_on]!r} and cannot be given"
                f" {value!r}: store {self.name!r} is sharded by it. Put a new entity, and delete this one."
            )

    @contextmanager
    def edit(self, id: UUID | str, **key: Any) -> Iterator[Entity]:
        """Return a context manager that yields an entity to be changed, and stores it at the end.

        The entity's row is locked until the end of the block, so no other writer can change the
        entity in between. If the block raises an error, nothing is written.

        :param key: the property ``shard_on`` with its value, such as ``user_id=7``; nothing if the
            store has no ``shard_on``.
        :raises EntityNotFound: the store has no such entity.
        :raises EntityDamaged: the stored body of the entity cannot be read.

        Its end raises the errors of :meth:`put`.
        """
        with self._locked(as_uuid(id), key) as (state, _):
            if isinstance(state, EntityDamaged):
                raise state
            yield state
            self.put(state)

    def delete(self, id: UUID | str, **key: Any) -> None:
        """Delete an entity, whatever its version is.

        Its row stays without properties until the cleaner has removed its index rows. An entity
        with a damaged body can also be deleted.

        :param key: the property ``shard_on`` with its value, such as ``user_id=7``; nothing if the
            store has no ``shard_on``.
        :raises EntityNotFound: the store has no such entity.
        :raises FormerRowsFull: see :meth:`put`.
        """
        # Repeat the deletion if the key or its shard moves meanwhile, unless the caller is in a
        # transaction.
        repeated(self.group, partial(self._delete, as_uuid(id), key))

    def _delete(self, id: UUID, key: Mapping[str, Any]) -> None:
        with self._locked(id, key) as (state, rows):
            stored = state._stored if isinstance(state, Entity) else {}
            with unbound():
                updated = rows.filter(has_room()).update(
                    body=b"",
                    version=F("version") + 1,
                    marked_at=timezone.now(),
                    pending=with_rows([(i, i.values_of(stored)) for i in self.indexes]),
                )
            if not updated:
                raise self._full(id)

    @contextmanager
    def _locked(
        self, id: UUID, key: Mapping[str, Any]
    ) -> Iterator[tuple[Entity | EntityDamaged, Any]]:
        """Return a context manager that locks an entity in its block. It yields a pair: the entity,
        and a queryset of its row.
        """
        condition = {"id": id, self.key_name: self._key(id, key)}
        block = sharded_orm.atomic(self.model, **{self.key_name: condition[self.key_name]})
        with block:
            with unbound():
                rows: Any = self.model._default_manager.filter(**condition)
                if not connections[str(block.using)].features.has_select_for_update:
                    # SQLite has no row locks. It might refuse the first write of a transaction that
                    # has begun with a read. So begin with a write that changes nothing.
                    rows.update(version=F("version"))
                row = rows.select_for_update().values_list(*self._names).first()
            if row is None or not row[4]:
                raise self._not_found(id, key)
            yield self._entity(row), rows

    @contextmanager
    def locked_values(self, id: UUID, key: Any) -> Iterator[Entity | EntityDamaged | None]:
        """Return a context manager that locks an entity, and yields it; None if there is no entity.

        It waits for open transactions that have written the entity, and keeps new ones out.

        :param key: the shard key of the entity.
        """
        stored = {} if self.shard_on is None else {self.shard_on: key}
        alias = self.alias_of(id, key)
        rows = self._rows(id, stored).select_for_update().values_list(*self._names)
        with transaction.atomic(using=alias):
            row = rows.first() if connections[alias].features.has_select_for_update else None
            if row is None:
                # Lock the entity by inserting a row with the same id. The INSERT waits for an open
                # transaction that has inserted the entity. A SELECT would not wait, because
                # PostgreSQL does not see that entity yet, and SQLite has no row locks.
                placeholder = self._row(id, stored, version=0, body=b"", updated=timezone.now())
                try:
                    with transaction.atomic(using=alias):
                        placeholder.save(force_insert=True)
                except IntegrityError:
                    row = rows.first()
                else:
                    yield None
                    self._rows(id, stored).delete()
                    return
            yield self._entity(row) if row is not None and row[4] else None
