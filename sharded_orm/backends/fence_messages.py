"""Errors of the triggers that refuse writes of a key while it moves (the key's fence).

The triggers must use the texts and codes of this module. On MySQL and MariaDB, a trigger runs
``SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = …``, on PostgreSQL ``RAISE … USING ERRCODE = '45000'``,
on SQLite ``RAISE(ABORT, …)``, each with :data:`MARKER`.
"""

from __future__ import annotations

from sharded_orm.backends.sqlstate import DEADLOCK, SERIALIZATION_FAILURE, sqlstate_of

#: The beginning of the error message when a trigger refuses a write.
MARKER = "sharded_orm: the shard key of this row is moving to another shard"
#: The error message when a trigger refuses a write because a whole table is closed for writes. MySQL
#: allows 128 characters in a message.
CLOSED_TABLE = (
    "sharded_orm: this table has moved to shards and is closed for writes; see"
    " 'manage.py shards import --unfollow'"
)
#: The beginning of the error message of a trigger that refuses a write on the passive side of a
#: pair: the shard is active on the other server (:mod:`sharded_orm.backends.side_fence`).
SIDE_MARKER = "sharded_orm: this server is the passive side of a pair for this database"
#: The SQLSTATE of the error with which a trigger refuses a write.
SQLSTATE = "45000"
#: ER_SIGNAL_EXCEPTION, the error number of a SIGNAL with SQLSTATE 45000.
SIGNAL_ERROR = 1644
#: ER_LOCK_DEADLOCK. While a fence closes, writers of the key may wait for the process that closes
#: it, and that process for the writers.
_DEADLOCK = 1213


def is_refusal(error: BaseException) -> bool:
    """Whether the driver's error ``error`` comes from a trigger (a fence) that has refused a write
    of a moving key.
    """
    return _message(error).startswith(MARKER)


def is_side_refusal(error: BaseException) -> bool:
    """Whether the driver's error ``error`` comes from the fence of the passive side of a pair."""
    return _message(error).startswith(SIDE_MARKER)


def _message(error: BaseException) -> str:
    """Return the message of a trigger that has refused a write. For any other error, return its
    message, or "".
    """
    arguments = error.args
    if arguments[:1] == (SIGNAL_ERROR,):
        arguments = arguments[1:]
    return arguments[0] if arguments and isinstance(arguments[0], str) else ""


def is_deadlock(error: BaseException) -> bool:
    """Whether ``error`` means that a transaction has failed because of another one, and may be run
    again.

    Either the two transactions have waited for each other's locks. Or, on PostgreSQL with an
    isolation level above READ COMMITTED, the other transaction has changed a row that the failed
    transaction has read. The row may be the fence of a key, by which triggers decide whether to
    refuse writes.
    """
    return error.args[:1] == (_DEADLOCK,) or sqlstate_of(error) in (
        DEADLOCK,
        SERIALIZATION_FAILURE,
    )
