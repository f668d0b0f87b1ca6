"""The hooks by which other parts follow the ORM's writes to a model, inside the transaction of each write.

A :class:`WriteFollower` is called around each statement of the ORM that writes rows on a shard, and if
it asks for it, also in other databases with a backend of this package. What it has to do when the transaction ends, it does as a :class:`CommitWatcher` of the connection object.
Followers belong to higher layers: an app of Django provides them when it is ready.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class WriteFollower(Protocol):
    """An object that is called for each statement of the ORM that writes rows of a model."""

    def concerns(self, query: Any) -> bool:
        """Whether :meth:`write` has to be called for the statement of ``query``. Sends nothing.

        If no part of the library follows a statement, it needs no transaction.
        """

    def write(self, compiler: Any, execute: Callable[[], Any]) -> Any:
        """Run the statement of ``compiler``, and return its result. Called while a transaction is open.

        If this method raises an error, the statement's block of ``atomic()`` must be rolled back.

        :param compiler: the compiler of the INSERT, UPDATE or DELETE.
        :param execute: runs the statement. It compiles ``compiler.query``, so this method may limit the
            query first.
        """


class CommitWatcher(Protocol):
    """An object that is told of the end of one transaction of a connection object.

    The connection object has it among its ``commit_watchers``. All methods are called in the thread of
    the connection object.
    """

    def before_commit(self) -> None:
        """Called immediately before COMMIT. An error refuses the COMMIT, and rolls the transaction back."""

    def may_commit(self) -> None:
        """Note that the next statement may commit implicitly what was written until now."""

    def savepoint(self, sid: str) -> None:
        """Note that a savepoint was set."""

    def savepoint_rolled_back(self, sid: str) -> None:
        """Note that what was written since a savepoint is rolled back.

        :param sid: the savepoint; one that was set before the connection had this watcher is unknown.
        """

    def ended(self, committed: bool | None) -> None:
        """Note the end of the transaction. Called once, and must not raise errors.

        :param committed: True after COMMIT, False after a rollback, None if it is unknown.
        """


#: Returns the follower of a model; None if the model is not followed. Called for each write, so it
#: must be cheap.
FollowerOf = Callable[[Any], WriteFollower | None]

_finders: list[FollowerOf] = []
_finders_everywhere: list[FollowerOf] = []


def provide_followers(follower_of: FollowerOf, *, everywhere: bool = False) -> None:
    """Add a function that names the follower of a model.

    :param everywhere: whether the followers are also called for writes in other databases than those of
        shards.
    """
    (_finders_everywhere if everywhere else _finders).append(follower_of)


def followers_of(model: Any, *, on_shard: bool) -> list[WriteFollower]:
    """Return the followers of ``model``, which may be a historical model of a migration.

    :param on_shard: whether the database of the write is a shard.
    """
    finders = [*_finders, *_finders_everywhere] if on_shard else _finders_everywhere
    return [follower for find in finders if (follower := find(model)) is not None]
