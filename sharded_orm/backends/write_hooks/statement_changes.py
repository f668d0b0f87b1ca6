"""Record what the statements of one transaction have changed, except what a savepoint has undone.

A :class:`~sharded_orm.backends.write_hooks.followers.WriteFollower` adds each statement that it follows
to the :class:`StatementWatcher` of its transaction.
"""

from __future__ import annotations

from typing import Any, Generic, Self, TypeVar


class StatementChange:
    """The change that one statement has made. Subclasses add the details."""

    #: Whether the object that follows the model's writes has completed its work for each changed row.
    is_complete = False
    #: Whether the statement was undone, because a savepoint before it was rolled back.
    is_undone = False


C = TypeVar("C", bound=StatementChange)


class StatementWatcher(Generic[C]):
    """Base class of a :class:`~sharded_orm.backends.write_hooks.followers.CommitWatcher` that records
    changes.

    A subclass adds ``before_commit()`` and ``ended()``.

    :param connection: the connection object of the shard, in a transaction.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._changes: list[C] = []
        #: Id of each savepoint -> the number of changes at the time when it was set.
        self._savepoints: dict[str, int] = {}

    @classmethod
    def of(cls, connection: Any) -> Self:
        """Return the object of this class that watches the open transaction of ``connection``. If
        there is none, add one.
        """
        for watcher in connection.commit_watchers:
            if isinstance(watcher, cls):
                return watcher
        own = cls(connection)
        connection.commit_watchers += (own,)
        return own

    def incomplete(self) -> list[C]:
        """Return the changes that would be committed although their work is not complete."""
        return [
            change for change in self._changes if not change.is_complete and not change.is_undone
        ]

    def may_commit(self) -> None:
        """Called before a statement that may commit implicitly. Does nothing; a subclass may override
        it.
        """

    def savepoint(self, sid: str) -> None:
        self._savepoints[sid] = len(self._changes)

    def savepoint_rolled_back(self, sid: str) -> None:
        # If the savepoint is unknown, it was set before this object was created. So the rollback
        # undoes all changes that this object has recorded.
        for change in self._changes[self._savepoints.get(sid, 0) :]:
            change.is_undone = True
