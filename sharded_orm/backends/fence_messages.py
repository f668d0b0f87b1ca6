"""The error messages with which triggers refuse writes, and functions that recognize these errors.

For example, while a shard key moves, triggers refuse the writes of its rows. These triggers are the
key's fence. On MySQL and MariaDB, a trigger runs ``SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = …``.
On PostgreSQL it runs ``RAISE … USING ERRCODE = '45000'``, and on SQLite ``RAISE(ABORT, …)``.
Triggers may use only the texts and codes of this module, because the functions compare errors with
them.
"""

from __future__ import annotations

from sharded_orm.backends.sqlstate import DEADLOCK, SERIALIZATION_FAILURE, sqlstate_of

#: The beginning of the error message when a trigger refuses a write of a key that moves.
MARKER = "sharded_orm: the shard key of this row is moving to another shard"
#: The error message when a trigger refuses a write because its whole table was moved to shards, and
#: is closed. MySQL allows 128 characters in a message.
CLOSED_TABLE = (
    "sharded_orm: this table has moved to shards and is closed for writes; see"
    " 'manage.py shards import --unfollow'"
)
#: The beginning of the error message when a trigger refuses a write because this server is the
#: passive side of a pair. The writes of the shard have to go to the other server of the pair
#: (:mod:`sharded_orm.backends.side_fence`).
SIDE_MARKER = "sharded_orm: this server is the passive side of a pair for this database"
#: The SQLSTATE of the error with which a trigger refuses a write.
SQLSTATE = "45000"
#: ER_SIGNAL_EXCEPTION, the error number of a SIGNAL with SQLSTATE 45000.
SIGNAL_ERROR = 1644
#: ER_LOCK_DEADLOCK, the error number of a deadlock. A deadlock can happen while a fence closes. The
#: closing process waits for transactions that have written rows of the key, and one of these may
#: wait for the closing process.
_DEADLOCK = 1213


def is_refusal(error: BaseException) -> bool:
    """Whether the driver's error ``error`` means that a trigger has refused a write because the
    shard key of the row is moving.
    """
    return _message(error).startswith(MARKER)


def is_side_refusal(error: BaseException) -> bool:
    """Whether the driver's error ``error`` means that a trigger has refused a write on the passive
    side of a pair, because the other server takes the shard's writes.
    """
    return _message(error).startswith(SIDE_MARKER)


def _message(error: BaseException) -> str:
    """Return the message with which a trigger has refused a write. If ``error`` is another error,
    return its first argument if that is a text, otherwise "".
    """
    arguments = error.args
    if arguments[:1] == (SIGNAL_ERROR,):
        arguments = arguments[1:]
    return arguments[0] if arguments and isinstance(arguments[0], str) else ""


def is_deadlock(error: BaseException) -> bool:
    """Whether ``error`` means that a transaction has failed only because of another transaction, so
    that it may be run again.

    There are two cases. The two transactions have waited for each other's locks. Or, on PostgreSQL
    with an isolation level above READ COMMITTED, the other transaction has changed a row that the
    failed one has read. This row may also be the fence of a key, which each trigger reads to decide
    whether to refuse a write.
    """
    return error.args[:1] == (_DEADLOCK,) or sqlstate_of(error) in (
        DEADLOCK,
        SERIALIZATION_FAILURE,
    )
