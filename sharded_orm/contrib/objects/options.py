"""Reads the options in ``class ObjectMeta`` and ``class MappingMeta``, and checks them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sharded_orm.contrib.objects.exceptions import InvalidObjectType, WrongObjectType
from sharded_orm.ids.layout import PACKED, PackedLayout

#: The largest size in bytes of a body, the JSON with the fields of an object, unless
#: ``ObjectMeta.max_body`` sets another limit. The cache does not store larger values either.
MAX_BODY = 1_000_000


@dataclass(frozen=True)
class ObjectOptions:
    """The options that ``class ObjectMeta`` of an object declares.

    :param group: the group of shards; its strategy must be ``"embedded"``.
    :param type_id: a number that no other model of the group has. Ids contain it, so it must never
        change.
    :param layout: the parts of an id and their sizes; see
        :class:`~sharded_orm.models.PackedIDField`.
    :param max_body: the largest size of a body, in bytes of its JSON.
    :param removed: the names of former fields. Their values are dropped when an object is saved.
    :param cache: whether objects are cached.
    """

    group: str
    type_id: int
    layout: PackedLayout = PACKED
    max_body: int = MAX_BODY
    removed: tuple[str, ...] = ()
    cache: bool = False

    def check_id(self, name: str, value: Any) -> int:
        """Return ``value`` if it is an id of this type.

        :param name: the name of the class, for the error message.
        :raises WrongObjectType: the id is of another type.
        :raises InvalidID: the value is no id.
        """
        if self._are_own([value]):
            return int(value)  # This quick test saves unpack(), which takes ten times as long.
        parts = self.layout.unpack(value)
        if parts.type != self.type_id:
            raise WrongObjectType(
                f"{value!r} is an id of type {parts.type!r}, and the ids of {name} are of type"
                f" {self.type_id!r}. Ask the class of that type."
            )
        return int(value)

    def check_ids(self, name: str, values: Iterable[Any]) -> list[int]:
        """Return a list of ``values`` if all are ids of this type. See :meth:`check_id`."""
        ids = list(values)
        return ids if self._are_own(ids) else [self.check_id(name, value) for value in ids]

    def _are_own(self, values: list[Any]) -> bool:
        """Return True if all values are integers that are ids of this type.

        This is a quick test for the usual case. For ids in another form, such as ``"42"``, it
        returns False, and the caller checks each value by itself.
        """
        shift, mask = self._position_of_type
        return (
            {int}.issuperset(map(type, values))
            and {self.type_id}.issuperset([value >> shift & mask for value in values])
            and (not values or (min(values) >= 0 and max(values) < 1 << 63))
        )

    @cached_property
    def _position_of_type(self) -> tuple[int, int]:
        return self.layout.local_bits, (1 << self.layout.type_bits) - 1


def read_meta(
    label: str, meta: Any, known: Iterable[str], required: Iterable[str]
) -> dict[str, Any]:
    """Return the attributes of ``meta``, such as ``class ObjectMeta``, as a dict. Includes those of
    its bases.

    :param label: the name of ``meta`` in error messages, such as ``Pin.ObjectMeta``.
    :raises InvalidObjectType: an attribute is unknown or missing.
    """
    values = {
        name: getattr(meta, name) for name in dir(meta or object) if not name.startswith("__")
    }
    if unknown := values.keys() - set(known):
        raise InvalidObjectType(
            f"{label} does not know {sorted(unknown)!r}. It may have {sorted(known)!r}."
        )
    if missing := set(required) - values.keys():
        raise InvalidObjectType(f"{label} must set {sorted(missing)!r}.")
    return values


def names_of(label: str, value: Any) -> tuple[str, ...]:
    """Return ``value``, a text or a sequence of texts, as a tuple.

    :param label: what ``value`` is, for the error message, such as ``Pin.ObjectMeta.removed``.
    :raises InvalidObjectType: it is something else.
    """
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise InvalidObjectType(
            f"{label} is {value!r}. Give the name of a field, or a tuple of names."
        )
    return tuple(names)


def declared(name: str, bases: tuple[type, ...], attrs: dict[str, Any]) -> Any:
    """Return the attribute ``name`` that a new class declares or inherits. None if there is none.

    :param bases, attrs: the bases of the class, and the attributes in its body.
    """
    inherited = (getattr(base, name, None) for base in bases)
    return attrs.get(name) or next(filter(None, inherited), None)


def refuse_concrete_base(name: str, bases: tuple[type, ...]) -> None:
    """Raise an error if a base of the new class ``name`` has a table."""
    for base in bases:
        if hasattr(base, "_meta") and not base._meta.abstract:
            raise InvalidObjectType(
                f"{name} derives from {base.__name__}, which has a table of its own. Make the base class"
                " abstract, or the derived one a proxy."
            )
