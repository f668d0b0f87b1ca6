"""An entity: a set of properties with an id."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sharded_orm.contrib.entities.exceptions import InvalidEntityId


def as_uuid(id: uuid.UUID | str) -> uuid.UUID:
    """Return an id as a UUID.

    :param id: a UUID, or its text.
    :raises InvalidEntityId: it is neither.
    """
    if isinstance(id, uuid.UUID):
        return id
    try:
        return uuid.UUID(id)
    except (AttributeError, TypeError, ValueError) as exc:
        raise InvalidEntityId(
            f"{id!r} is no id of an entity. Pass a UUID, or its text of 32 hexadecimal digits."
        ) from exc


class Entity(dict[str, Any]):
    """A dict of properties, with the id and the version number that it has in a store.

    ::

        entity = Entity(user_id=7, title="A page")
        entity["title"] = "Another title"

    :param properties: names and values. Keyword arguments are properties, too.
    :param id: the id of the entity; a new random id by default. Never pass an id that another
        entity has had.

    Values have the types of JSON. In properties that the store declares, they have the types of the
    fields, such as a datetime. Only one thread at a time may use an instance. Needs no query.
    """

    __slots__ = ("_stored", "added_id", "id", "updated", "version")

    def __init__(
        self,
        properties: Mapping[str, Any] = {},  # it is only read
        /,
        *,
        id: uuid.UUID | str | None = None,
        **more: Any,
    ) -> None:
        super().__init__(properties, **more)
        self.id: uuid.UUID = uuid.uuid4() if id is None else as_uuid(id)
        #: The version number of the entity. It grows with each change. 0 until the entity is
        #: stored.
        self.version = 0
        #: The time when the entity was stored last.
        self.updated: datetime | None = None
        #: A number that begins with the time when the entity was stored first. To sort entities by
        #: this time, sort them by the number. None until the entity is stored.
        self.added_id: int | None = None
        # The declared properties as they were stored last. put() compares them with the present
        # ones, to find the index rows that change.
        self._stored: Mapping[str, Any] = {}

    def __repr__(self) -> str:
        return f"Entity({dict.__repr__(self)}, id={self.id!r}, version={self.version})"

    # Two entities are equal if they have the same id and the same properties.

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Entity) and other.id != self.id:
            return False
        return dict.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # like a dict
