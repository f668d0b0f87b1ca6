"""The errors of lookups. They are part of the tree of :mod:`sharded_orm.exceptions`."""

from __future__ import annotations

from django.db import IntegrityError, OperationalError

from sharded_orm.exceptions import ShardedOrmError


class LookupValueTaken(ShardedOrmError, IntegrityError):
    """The value of a unique lookup is taken: a row on any shard has it, or may get it in an open transaction.

    The block of ``atomic()`` is rolled back, as after the error of a unique index.
    """


class LookupRefused(ShardedOrmError, RuntimeError):
    """A write would leave rows without correct entries in a lookup.

    For example, an ``update()`` sets a field with a lookup to an expression, so the new values are
    not known. The write was refused, or its transaction was rolled back.
    """


class LookupExpired(ShardedOrmError, OperationalError):
    """A transaction with rows that have lookups was open for too long, and was rolled back.

    Other transactions took it for dead after some minutes, and have taken over the values of its
    rows. This happens only on databases, such as SQLite, that cannot report whether the database
    session of a transaction still exists.
    """
