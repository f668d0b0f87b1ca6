"""The errors of reference tables. They are part of the tree of :mod:`sharded_orm.exceptions`."""

from __future__ import annotations

from django.core.exceptions import ImproperlyConfigured
from django.db import IntegrityError

from sharded_orm.exceptions import OperationError, ShardedOrmError


class ReferenceTableError(ShardedOrmError):
    """Base class of the errors of reference tables."""


class InvalidReferenceModel(ReferenceTableError, ImproperlyConfigured):
    """A reference model, or its database, does not allow copies. The message lists every reason."""


class CopyReadOnly(ReferenceTableError, RuntimeError):
    """Rows of a reference table on a shard are copies. Only the global database can be written."""


class ReferenceRowKept(ReferenceTableError, IntegrityError):
    """A row of a reference table cannot be deleted.

    Either rows on a shard refer to it, or a shard does not answer. Nothing was deleted.
    """


class ReferenceModelNotFound(OperationError, LookupError):
    """No reference model has the given name."""
