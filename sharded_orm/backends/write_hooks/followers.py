"""Hooks by which other parts of the library follow the ORM's writes to a model.

A :class:`WriteFollower` is called around each statement of the ORM that writes rows on a shard,
inside the write's transaction; if it requests so, also in other databases with a backend of this
package. For its work at the end of the transaction, it adds a :class:`CommitWatcher` to the
connection object. Followers belong to higher layers, so a Django app provides them when it is
ready.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable


class WriteFollower(Protocol):
    """An object that is called for each statement of the ORM that writes rows of a model."""

    def concerns(self, query: Any) -> bool:
        """Whether :meth:`write` must be called for the statement of ``query``. Sends nothing.

        If False for all followers, and the model is not cached, the statement needs no transaction of
        its own.
        """

    def write(self, compiler: Any, execute: Callable[[], Any]) -> Any:
        """Run the statement of ``compiler``, and return its result. Called while a transaction is open.

        If this method raises an error, the atomic block around the statement must be rolled back.

        :param compiler: the compiler of the INSERT, UPDATE or DELETE.
        :param execute: runs the statement. It compiles ``compiler.query``, so this method may limit the
            query first.
        """


@runtime_checkable
class StatementFollower(WriteFollower, Protocol):
    """A follower that may be called without a transaction, if the id of the session is known before
    the statement is sent.
    """

    def needs_transaction(self, compiler: Any) -> bool:
        """Whether :meth:`write` needs an open transaction for the statement. Sends nothing.

        If False, and if the model has no other follower and is not cached, :meth:`write` may be called
        in autocommit. The statement is then a transaction by itself, and ``session_id()`` of the
        connection object is already known.
        """


class CommitWatcher(Protocol):
    """An object that is called at the end of one transaction of a connection object.

    The connection object has it in ``commit_watchers``. All methods are called in the thread of the
    connection object.
    """

    def before_commit(self) -> None:
        """Called immediately before COMMIT. If it raises an error, the transaction is rolled back
        instead.
        """

    def may_commit(self) -> None:
        """Called before a statement that may commit implicitly what was written until then."""

    def savepoint(self, sid: str) -> None:
        """Called after the savepoint ``sid`` was set."""

    def savepoint_rolled_back(self, sid: str) -> None:
        """Called after everything since the savepoint ``sid`` was rolled back.

        :param sid: id of the savepoint. It is unknown to this watcher if the savepoint was set before
            the watcher was added.
        """

    def ended(self, committed: bool | None) -> None:
        """Called once, after the transaction has ended. Must not raise errors.

        :param committed: True after COMMIT, False after a rollback, None if it is unknown.
        """


#: A function that returns the follower of a model; None if the model is not followed. The function
#: is called for each write, so it must be cheap.
FollowerOf = Callable[[Any], WriteFollower | None]

_finders: list[FollowerOf] = []
_finders_everywhere: list[FollowerOf] = []


def provide_followers(follower_of: FollowerOf, *, everywhere: bool = False) -> None:
    """Add a function that returns the follower of a model: the object to call for each write to the
    model.

    :param everywhere: whether the followers that it returns are also called for writes in databases
        that are not shards.
    """
    (_finders_everywhere if everywhere else _finders).append(follower_of)


def is_followed(model: Any, *, on_shard: bool) -> bool:
    """Whether :func:`followers_of` returns a follower for the same arguments."""
    for find in _finders_everywhere:
        if find(model) is not None:
            return True
    if on_shard:
        for find in _finders:
            if find(model) is not None:
                return True
    return False


def followers_of(model: Any, *, on_shard: bool) -> list[WriteFollower]:
    """Return the followers of ``model``: the objects to call for each write to the model.

    :param model: the model, perhaps a historical one of a migration.
    :param on_shard: whether the database of the write is a shard.
    """
    finders = [*_finders, *_finders_everywhere] if on_shard else _finders_everywhere
    return [follower for find in finders if (follower := find(model)) is not None]
