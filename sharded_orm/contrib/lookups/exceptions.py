"""The errors of lookups. They are part of the tree of :mod:`sharded_orm.exceptions`."""

from __future__ import annotations

from django.db import IntegrityError, OperationalError

from sharded_orm.exceptions import ShardedOrmError


class LookupValueTaken(ShardedOrmError, IntegrityError):
    """The value of a unique lookup is taken: a row on any shard has it, or may get it in an open transaction.

    The block of ``atomic()`` is rolled back, as after the error of a unique index.
    """


class LookupRefused(ShardedOrmError, RuntimeError):
    """The entries of a lookup cannot be kept equal to the rows that a write changes.

    The write was refused, or its transaction was rolled back.
    """


class LookupExpired(ShardedOrmError, OperationalError):
    """A transaction was rolled back: it stayed open too long after it had written rows with
    lookups.

    Meanwhile, other transactions have reserved the values of these rows. This happens only on
    databases, such as SQLite, that cannot report whether another transaction's session still
    exists.
    """
