"""Names for the locks on a schema that sessions take while a key or a shard moves.

A schema has a separate lock for each of these names. A name says what the lock is for. Only one
session at a time can hold a lock. How the locks are taken depends on the server: see
``mysql/move_locks.py`` and ``postgresql/move_locks.py``.
"""

from __future__ import annotations

from typing import Final

#: Held by a session while it changes tables and triggers of the schema.
TABLES: Final = "tables"
#: Held by a session while the shard changes the active side of its pair of servers.
SWITCH: Final = "switch"


def of_fence(number: int) -> str:
    """Return the name of the lock that a session holds while it changes rows of a moving key.

    :param number: the number of the key's fence, which refuses the writes of other sessions to
        these rows.
    """
    return f"fence {number}"


def of_copier(number: int) -> str:
    """Return the name of the lock that a session holds as long as it copies rows for a move. If
    another process takes the move over, it finds the session by this lock, and ends it.

    :param number: the number of the move.
    """
    return f"copy {number}"
