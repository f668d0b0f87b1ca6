"""The fence of a pair of servers: the database refuses the writes of a shard on one of the servers.

The servers of a *pair* replicate from each other (Yupoo, Y9). For each shard, the *active* side
takes writes, and the other is *passive*. If both took writes of the same rows, changes would be
lost without an error. So triggers refuse writes on the passive side, also those of raw SQL and of
programs without a topology. Replicated changes call no triggers. Other schemas of the server are
not affected.

Fences are not replicated: each server has its own. ``connection.side_fence()`` returns an object
with a session of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from sharded_orm.backends.own_session import OwnSession
from sharded_orm.backends.snapshot import OWN_PREFIX

#: The function that the triggers of a fence call. It returns 1 if writes are refused.
FUNCTION: Final = f"{OWN_PREFIX}side"
#: The SQL function that returns the last epoch in which this side was active or followed the active
#: side. Each time that a dead active side is given up, a new epoch begins.
EPOCH: Final = f"{OWN_PREFIX}epoch"
#: The beginning of the names of the triggers of a fence.
TRIGGER_PREFIX: Final = f"{OWN_PREFIX}side_"


@dataclass(frozen=True)
class FenceState:
    """State of the fence of one shard on one server of a pair: triggers that refuse writes.

    :param is_closed: whether the triggers refuse writes.
    :param open_tables: the tables that lack these triggers, and so accept writes in any case.
        Tables that this library keeps for its own operations are not listed.
    """

    is_closed: bool
    open_tables: tuple[str, ...]

    @property
    def accepts_writes(self) -> bool:
        """Whether writes are accepted, if only to some of the tables."""
        return not self.is_closed or bool(self.open_tables)


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
        """Return the names of the tables that lack triggers of the fence. One query.

        Tables that this library keeps for its own operations are left out.
        """

    @abstractmethod
    def privilege_problems(self) -> list[str]:
        """Return the reasons why the account cannot create the fence's triggers, as sentences.

        Changes nothing.
        """

    @abstractmethod
    def obstacles(self) -> list[str]:
        """Return texts with the reasons why triggers could miss a write, or could refuse only a
        part of it. Empty if there is no such reason.
        """

    @abstractmethod
    def prepare(self, patience: float) -> None:
        """Create the fence's triggers on all tables. If the fence is new, its triggers accept writes.

        Later, :meth:`close` lets the triggers of all tables refuse writes from the same moment on.

        :param patience: seconds to wait for transactions that use the tables.
        :raises django.db.OperationalError: the transactions took longer than ``patience``.
        """

    @abstractmethod
    def close(self, patience: float) -> None:
        """Let the triggers refuse writes. When this returns, every transaction that has written is over.

        :raises django.db.OperationalError: a transaction took longer than ``patience`` seconds. The
            fence is as before.
        """

    @abstractmethod
    def open(self, patience: float) -> None:
        """Let the triggers accept writes again. If they accept writes already, no write is blocked."""

    @abstractmethod
    def switching(self) -> AbstractContextManager[None]:
        """Return a context manager for a change of the active side. Writes that the fence refuses
        meanwhile wait until the context manager or this session ends.

        They wait by calling ``connection.wait_for_side_switch()`` on this server. The context
        manager sends two statements.
        """

    @abstractmethod
    def store_epoch(self, epoch: int) -> None:
        """Store ``epoch`` on this server as the number of the shard's epoch. Each time that a dead
        active side is given up, a new epoch begins.
        """

    @abstractmethod
    def remove(self, patience: float) -> None:
        """Open the fence, and drop its triggers."""
