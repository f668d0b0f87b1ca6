"""The purposes for which sessions of a move lock a schema. Sessions with the same purpose exclude each other.

A move copies the rows of a key or of a whole shard to another node. Each kind of server has locks of its
own: ``mysql/move_locks.py`` and ``postgresql/move_locks.py``.
"""

from __future__ import annotations

from typing import Final

#: The purpose of the lock that a session holds while it changes tables and triggers.
TABLES: Final = "tables"
#: The purpose of the lock that a session holds while the shard changes the active side of
#: its pair of servers.
SWITCH: Final = "switch"


def of_fence(number: int) -> str:
    """Return the purpose of the lock under which a session changes the rows of a moving key.

    :param number: the number of the key's fence, which refuses all other writes to the key.
    """
    return f"fence {number}"


def of_copier(number: int) -> str:
    """Return the purpose of the lock under which a session writes a shard's copy on another node.

    :param number: the number of the copy.
    """
    return f"copy {number}"
