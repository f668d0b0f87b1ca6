"""The errors of entities. They are part of the tree of :mod:`sharded_orm.exceptions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured, ObjectDoesNotExist
from django.db import DataError, IntegrityError, OperationalError

from sharded_orm.exceptions import OperationError, ShardedOrmError

if TYPE_CHECKING:
    from sharded_orm.contrib.entities.entity import Entity


class EntityError(ShardedOrmError):
    """Base class of the errors of entities."""


class InvalidStore(EntityError, ImproperlyConfigured):
    """A store or an index is declared in a way that cannot work. The message lists every reason."""


class InvalidEntity(EntityError, RuntimeError):
    """A value is no entity, or no entity of this store. Nothing was written."""


class InvalidProperty(EntityError, ValueError):
    """A property of an entity has a value that cannot be stored unchanged. Nothing was written."""


class InvalidEntityId(EntityError, ValueError):
    """A value is not the id of an entity: neither a UUID nor the text of one."""


class EntityTooLarge(EntityError, DataError):
    """The compressed body of an entity is larger than its store allows. Nothing was written."""


class EntityNotFound(EntityError, ObjectDoesNotExist):
    """The store has no entity with this id, or none with this id and shard key."""


class EntityExists(EntityError, IntegrityError):
    """A new entity has the id of an entity that the store already has."""


class EntityChanged(EntityError, OperationalError):
    """An entity was changed or deleted by others after it was read. Nothing was written."""


class FormerRowsFull(EntityError, OperationalError):
    """An entity was changed so often that its list of former index rows is full.

    The list has the index rows of earlier versions of the entity, until the cleaner removes them.
    Run the cleaner, and try again. Nothing was written.
    """


class EntityDamaged(EntityError, DataError):
    """The stored body of an entity cannot be read."""

    def __init__(self, message: str, entity_id: UUID) -> None:
        super().__init__(message)
        self.entity_id = entity_id
        #: The entities that can be read, by id. Set only if get_many() raises the error.
        self.others: Mapping[UUID, Entity] = {}


class IndexNotServed(EntityError, RuntimeError):
    """An index cannot be read, because it may lack rows of old entities, or is being dropped."""


class InvalidIndexQuery(EntityError, RuntimeError):
    """An index cannot answer a query by these properties."""


class InvalidIndexCursor(EntityError, ValueError):
    """A text is not a cursor of this index, or it is a cursor of a query by different properties."""


class UniqueValueTaken(EntityError, IntegrityError):
    """Another entity has the same values in a unique index. The new entity was not written.

    Also raised if the other entity loses the values in a transaction that is not committed yet. If
    that transaction is rolled back, the other entity still has the values.
    """


class ReservationRefused(EntityError, RuntimeError):
    """An entity cannot be stored in this transaction, because of its row in a unique index.

    The row is on another shard, on which the caller has a transaction that is committed separately.
    If only one of the two commits, the row and the entity would not match. Nothing was written.
    """


class StoreNotFound(OperationError, LookupError):
    """No store or index has the given name."""
