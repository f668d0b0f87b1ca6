"""Record the changes by the statements of one transaction. Changes that a rollback to a savepoint
has undone do not count.

A :class:`~sharded_orm.backends.write_hooks.followers.WriteFollower`, which is called for each write
to a model, adds each statement to the :class:`StatementWatcher` of the transaction.
"""

from __future__ import annotations

from typing import Any, Generic, Self, TypeVar


class StatementChange:
    """What one statement has changed. Subclasses add the details."""

    #: Whether the :class:`~sharded_orm.backends.write_hooks.followers.WriteFollower` of the model
    #: has done its work for each row that the statement has changed.
    is_complete = False
    #: Whether the database has undone the change, because the transaction was rolled back to a
    #: savepoint that was set before the statement.
    is_undone = False


C = TypeVar("C", bound=StatementChange)


class StatementWatcher(Generic[C]):
    """Base class of a :class:`~sharded_orm.backends.write_hooks.followers.CommitWatcher` that
    records the changes of its transaction.

    A subclass adds ``before_commit()`` and ``ended()``.

    :param connection: the connection object of the shard, in a transaction.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._changes: list[C] = []
        #: Maps the id of each savepoint to the number of changes that were recorded before it was
        #: set.
        self._savepoints: dict[str, int] = {}

    @classmethod
    def of(cls, connection: Any) -> Self:
        """Return the watcher of this class for the open transaction of ``connection``. Create it if
        there is none yet.
        """
        for watcher in connection.commit_watchers:
            if isinstance(watcher, cls):
                return watcher
        own = cls(connection)
        connection.commit_watchers += (own,)
        return own

    def incomplete(self) -> list[C]:
        """Return the changes that a COMMIT would store now although the follower has not done all
        work for them.
        """
        return [
            change for change in self._changes if not change.is_complete and not change.is_undone
        ]

    def may_commit(self) -> None:
        """Called before a statement that may commit implicitly. Does nothing here; a subclass may
        override it.
        """

    def savepoint(self, sid: str) -> None:
        self._savepoints[sid] = len(self._changes)

    def savepoint_rolled_back(self, sid: str) -> None:
        # A savepoint that this object does not know was set before this object was created. So the
        # rollback undoes all changes that this object has recorded.
        for change in self._changes[self._savepoints.get(sid, 0) :]:
            change.is_undone = True
