"""The errors of lookups. They are part of the tree of :mod:`sharded_orm.exceptions`."""

from __future__ import annotations

from django.db import IntegrityError, OperationalError

from sharded_orm.exceptions import ShardedOrmError


class LookupValueTaken(ShardedOrmError, IntegrityError):
    """Another row has the value of a unique lookup, on whatever shard, or a transaction may give it one.

    The block of ``atomic()`` is rolled back, as after the error of a unique index.
    """


class LookupRefused(ShardedOrmError, RuntimeError):
    """A lookup cannot follow a write, so the write was refused, or its transaction rolled back."""


class LookupExpired(ShardedOrmError, OperationalError):
    """A transaction was open for too long after it wrote to a lookup, and others have taken a value over.

    It was rolled back. Only if the database cannot tell whether the session of a writer still exists, as
    on SQLite.
    """
