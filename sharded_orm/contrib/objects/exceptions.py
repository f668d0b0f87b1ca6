"""The errors of objects and mappings. They are part of the tree of :mod:`sharded_orm.exceptions`."""

from __future__ import annotations

from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.db import DatabaseError, DataError

from sharded_orm.exceptions import ShardedOrmError


class ObjectError(ShardedOrmError):
    """Base class of the errors of objects and mappings."""


class InvalidObjectType(ObjectError, ImproperlyConfigured):
    """The class of an object or mapping is declared wrongly."""


class InvalidValue(ObjectError, ValidationError):
    """A value cannot be stored. Nothing was written."""


class BodyTooLarge(ObjectError, DataError):
    """The body of an object has more bytes than ``ObjectMeta.max_body``. Nothing was written."""


class DamagedObject(ObjectError, DatabaseError):
    """The stored body of an object, or a value in it, cannot be read."""


class WrongObjectType(ObjectError, ValueError):
    """An id or an object is of another type, for example a ``Board`` where a ``Pin`` is expected."""


class ConcurrentEdit(ObjectError, DatabaseError):
    """Somebody else has changed or purged the object since it was read. Nothing was written."""


class UnsavedChanges(ObjectError, RuntimeError):
    """Reading the object again would discard changes that were not saved.

    Also raised by ``edit()`` for a new object, which has no stored values yet.
    """


class UnstoredObject(ObjectError, ValueError):
    """An object that was never stored cannot be deleted."""


class BodyFieldInQuery(ObjectError, RuntimeError):
    """A query names a field that is in the bodies of objects, which no database can search."""


class ObjectWriteRefused(ObjectError, RuntimeError):
    """A statement would write objects without comparing versions, or change the source or target of
    an entry.

    An entry is a row of a mapping. It relates a source object to a target object. These two never
    change. To relate other objects, remove the entry and add a new one.
    """


class InvalidPageSize(ObjectError, ValueError):
    """The number of objects that a page should have is too small or too large."""


class InvalidCursor(ObjectError, ValueError):
    """A text does not describe a :class:`Cursor`, a position in a mapping where a page ends."""
