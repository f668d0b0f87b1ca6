"""The fence of a shard on a pair of servers: it makes the database refuse the shard's writes on the
passive server.

The servers of a *pair* replicate from each other (Yupoo, Y9). For each shard, one server is the
*active* side, which takes the shard's writes. The other is the *passive* side. If both took writes
of the same rows, changes would be lost without an error. So triggers refuse writes on the passive
side. They also refuse raw SQL and the writes of programs that do not know the topology. Replicated
changes call no triggers. Other schemas of the server are not affected.

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

#: The SQL function that the fence's triggers call. It returns 1 if they must refuse writes.
FUNCTION: Final = f"{OWN_PREFIX}side"
#: The SQL function that returns the epoch of the shard (a number), as this server has stored it.
#: When one server of the pair is dead, an operator can give it up. Then the other server takes the
#: shard's writes, and stores a greater epoch. So the server with the smaller epoch is the one that
#: was given up. It may lack writes, or have writes that the other server lacks. So it must not
#: become active again before it has rejoined the pair.
EPOCH: Final = f"{OWN_PREFIX}epoch"
#: How the names of the fence's triggers begin.
TRIGGER_PREFIX: Final = f"{OWN_PREFIX}side_"


@dataclass(frozen=True)
class FenceState:
    """The state of the fence of one shard on one server of a pair.

    :param is_closed: whether the fence's triggers refuse writes.
    :param open_tables: the tables without such triggers. They accept writes even if the fence is
        closed. The tables that this library creates for its own operations are not listed.
    """

    is_closed: bool
    open_tables: tuple[str, ...]

    @property
    def accepts_writes(self) -> bool:
        """Whether this server accepts writes of the shard, to all of the tables or to some of them."""
        return not self.is_closed or bool(self.open_tables)


class SideFence(OwnSession, ABC):
    """The fence of one shard on one server of a pair. For one thread only.

    Each change is made under a lock, so that no other session of the library changes tables or
    triggers of the schema meanwhile. All changes can be repeated.

    :param confirm: called under the lock, before each change. Raises an error if this process must
        not make the change.
    """

    def __init__(self, connection: Any, confirm: Callable[[], None]) -> None:
        super().__init__(connection)
        self._confirm = confirm

    @abstractmethod
    def is_closed(self) -> bool:
        """Whether the fence's triggers refuse writes. One query.

        Tables without such triggers accept writes in any case, see :meth:`open_tables`.
        """

    @abstractmethod
    def open_tables(self) -> list[str]:
        """Return the names of the tables that have no triggers of the fence. One query.

        The tables that this library creates for its own operations are left out.
        """

    @abstractmethod
    def privilege_problems(self) -> list[str]:
        """Return the reasons why the account cannot create the fence's triggers, as sentences.

        Changes nothing.
        """

    @abstractmethod
    def obstacles(self) -> list[str]:
        """Return the reasons why a closed fence could let a write, or a part of it, pass. The list
        is empty if there is none.

        For example, foreign keys of other schemas may change rows without calling triggers. Or a
        table's engine does not undo the rows that a statement has changed before it was refused.
        """

    @abstractmethod
    def prepare(self, patience: float) -> None:
        """Create the fence's triggers on all tables. A new fence is open: its triggers accept
        writes.

        When the triggers exist, :meth:`close` changes only one value, which makes the triggers of
        all tables refuse writes.

        :param patience: seconds to wait for transactions that use the tables.
        :raises django.db.OperationalError: the transactions took longer than ``patience``.
        """

    @abstractmethod
    def close(self, patience: float) -> None:
        """Close the fence: its triggers refuse writes from now on. When this method returns, all
        transactions that have written to the shard are over.

        :raises django.db.OperationalError: a transaction took longer than ``patience`` seconds. The
            fence is as before.
        """

    @abstractmethod
    def open(self, patience: float) -> None:
        """Open the fence: its triggers accept writes from now on. If the fence is open already, no
        write has to wait.
        """

    @abstractmethod
    def switching(self) -> AbstractContextManager[None]:
        """Return a context manager within which the active side of the shard is changed.

        During the change, fences refuse writes. A program whose write this server has refused need
        not fail. It can wait by ``connection.wait_for_side_switch()``, until the ``with`` block or
        the session of this object ends, and then repeat the write. The context manager sends two
        statements.
        """

    @abstractmethod
    def store_epoch(self, epoch: int) -> None:
        """Store ``epoch`` on this server as the shard's epoch.

        The epoch is a number. It grows when an operator gives up a dead server of the pair, so that
        the other server takes the shard's writes alone.
        """

    @abstractmethod
    def remove(self, patience: float) -> None:
        """Open the fence, and drop its triggers."""
