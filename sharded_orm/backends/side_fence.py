"""The fence of a pair of servers: the database refuses the writes of a shard on one of the servers.

The servers of a *pair* replicate from each other (Yupoo, Y9). For each shard, one side is *active* and
takes writes; the other is *passive*. If both took writes of the same rows, changes would be lost
although the replication reports no error. So triggers refuse writes on the passive side, also those of
raw SQL and of programs that know of no topology. Replicated changes call no triggers, and other
schemas on the same server are not affected.

Nothing of a fence is replicated: each server has its own. ``connection.side_fence()`` returns an object
with a session of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

from sharded_orm.backends.own_session import OwnSession
from sharded_orm.backends.snapshot import OWN_PREFIX

#: The function that the triggers of a fence call. It returns 1 if writes are refused.
FUNCTION: Final = f"{OWN_PREFIX}side"
#: The beginning of the names of the triggers of a fence.
TRIGGER_PREFIX: Final = f"{OWN_PREFIX}side_"


class SideFence(OwnSession, ABC):
    """The fence of one shard on one server of a pair. For one thread only.

    Each change is made under a lock: no other session of the library changes tables or triggers of the
    schema meanwhile. All changes can be repeated.

    :param confirm: called under the lock, before each change. Raises an error if this process must not
        make the change.
    """

    def __init__(self, connection: Any, confirm: Callable[[], None]) -> None:
        super().__init__(connection)
        self._confirm = confirm

    @abstractmethod
    def is_closed(self) -> bool:
        """Whether the triggers of the fence refuse writes. One query.

        Tables without triggers accept writes in any case, see :meth:`open_tables`.
        """

    @abstractmethod
    def open_tables(self) -> list[str]:
        """Return the tables without the triggers of the fence, except those of this library's own
        operations. One query.
        """

    @abstractmethod
    def privilege_problems(self) -> list[str]:
        """Return the reasons why the account cannot make a fence, as sentences. Changes nothing."""

    @abstractmethod
    def obstacles(self) -> list[str]:
        """Return the reasons why triggers cannot refuse each write as a whole, as sentences."""

    @abstractmethod
    def prepare(self, patience: float) -> None:
        """Create the triggers of the fence on all tables. If there was no fence, writes are accepted as
        before.

        Then :meth:`close` closes all tables at the same moment.

        :param patience: seconds to wait for transactions that use the tables.
        :raises django.db.OperationalError: the transactions took longer.
        """

    @abstractmethod
    def close(self, patience: float) -> None:
        """Let the triggers refuse writes. When this returns, every transaction that has written is over.

        :raises django.db.OperationalError: a transaction took longer than ``patience`` seconds. The
            fence is as before.
        """

    @abstractmethod
    def open(self, patience: float) -> None:
        """Let the triggers accept writes again."""

    @abstractmethod
    def remove(self, patience: float) -> None:
        """Open the fence, and drop its triggers."""
