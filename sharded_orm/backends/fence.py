"""The fence of a key that moves: triggers with which a shard refuses writes of the key.

The text and the codes are a contract with the operation that makes the triggers. On MySQL and MariaDB a
trigger runs ``SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = …``, on PostgreSQL ``RAISE … USING ERRCODE =
'45000'``, on SQLite ``RAISE(ABORT, …)``, each with :data:`MARKER`.
"""

from __future__ import annotations

from sharded_orm.backends.sqlstate import DEADLOCK, SERIALIZATION_FAILURE, sqlstate_of

#: The message of a trigger that refuses a write begins with this text.
MARKER = "sharded_orm: the shard key of this row is moving to another shard"
#: The message of a trigger of a table that is captured whole. MySQL allows 128 characters.
CLOSED_TABLE = (
    "sharded_orm: this table has moved to shards and is closed for writes; see"
    " 'manage.py shards import --unfollow'"
)
#: The SQLSTATE of the error. The server reports it with the error number below.
SQLSTATE = "45000"
#: ER_SIGNAL_EXCEPTION, the error number of a SIGNAL with SQLSTATE 45000.
SIGNAL_ERROR = 1644
#: ER_LOCK_DEADLOCK. Writers of a key and the mover that closes its fence may wait for each other.
_DEADLOCK = 1213


def is_refusal(error: BaseException) -> bool:
    """Whether ``error``, an error of a database driver, is the refusal of a fence."""
    arguments = error.args
    if arguments[:1] == (SIGNAL_ERROR,):
        arguments = arguments[1:]
    return bool(arguments) and isinstance(arguments[0], str) and arguments[0].startswith(MARKER)


def is_deadlock(error: BaseException) -> bool:
    """Whether the server has ended a transaction because of another one. It may be run again.

    They have waited for each other. Or, on PostgreSQL with an isolation level above READ COMMITTED, the
    other one has changed what this one has read, such as the fence of a key.
    """
    return error.args[:1] == (_DEADLOCK,) or sqlstate_of(error) in (
        DEADLOCK,
        SERIALIZATION_FAILURE,
    )
