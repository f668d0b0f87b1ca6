"""What the statements of one transaction have changed, without what a savepoint has undone.

A :class:`~sharded_orm.backends.write_hooks.followers.WriteFollower` adds each statement that it follows
to the :class:`StatementWatcher` of its transaction.
"""

from __future__ import annotations

from typing import Any, Generic, Self, TypeVar


class StatementChange:
    """What one statement has changed."""

    #: Whether the follower has done its part for each row that the statement has changed.
    is_complete = False
    #: Whether the statement was rolled back with a savepoint.
    is_undone = False


C = TypeVar("C", bound=StatementChange)


class StatementWatcher(Generic[C]):
    """Base class of a :class:`~sharded_orm.backends.write_hooks.followers.CommitWatcher` that keeps changes.

    A subclass adds ``before_commit()`` and ``ended()``.

    :param connection: the connection object of the shard, in a transaction.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._changes: list[C] = []
        #: The number of changes at the time that each savepoint was set.
        self._savepoints: dict[str, int] = {}

    @classmethod
    def of(cls, connection: Any) -> Self:
        """Return the object of the open transaction of ``connection``. Make it if there is none."""
        for watcher in connection.commit_watchers:
            if isinstance(watcher, cls):
                return watcher
        own = cls(connection)
        connection.commit_watchers += (own,)
        return own

    def incomplete(self) -> list[C]:
        """Return the changes that would be committed, although a part of their followers is missing."""
        return [
            change for change in self._changes if not change.is_complete and not change.is_undone
        ]

    def may_commit(self) -> None:
        """Do nothing if a statement may commit implicitly. A subclass may override this."""

    def savepoint(self, sid: str) -> None:
        self._savepoints[sid] = len(self._changes)

    def savepoint_rolled_back(self, sid: str) -> None:
        # This object was made after an unknown savepoint was set, so all its changes are undone.
        for change in self._changes[self._savepoints.get(sid, 0) :]:
            change.is_undone = True
