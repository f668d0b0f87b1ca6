"""The errors of mirrors. They are part of the tree of :mod:`sharded_orm.exceptions`."""

from __future__ import annotations

from django.core.exceptions import ImproperlyConfigured
from django.db import DataError, IntegrityError

from sharded_orm.exceptions import OperationError, ShardedOrmError


class MirrorError(ShardedOrmError):
    """Base class of the errors of mirrors."""


class InvalidMirror(MirrorError, ImproperlyConfigured):
    """A model's ``ShardMeta`` declares a mirror that cannot be kept up to date.

    The message lists every reason.
    """


class MirrorReadOnly(MirrorError, RuntimeError):
    """A mirror cannot be written, because its rows are copies of its source. Write the source."""


class WriteNotFollowed(MirrorError, RuntimeError):
    """A write of a source was refused, because it is not known which rows it changes.

    Without these rows, the change could not be repeated in the mirrors. Nothing was written.
    """


class MirrorRaced(MirrorError, IntegrityError):
    """Other processes have written the same rows of a mirror at the same time, again and again.

    The writes are still recorded in the outbox, a table of writes to deliver, so a relay delivers
    them later.
    """


class IdUsedTwice(MirrorError, RuntimeError):
    """Two rows of a source have the same id under different shard keys, and a mirror can have only one.

    The write of the second row stays in the outbox, the table of writes to deliver.
    """


class VersionsExhausted(MirrorError, DataError):
    """A version, the number that orders the writes of a source's row, does not fit into 63 bits any more."""


class MirrorNotFound(OperationError, LookupError):
    """No mirror has the given name."""
