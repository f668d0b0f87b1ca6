"""Hooks by which other parts of the library follow the ORM's writes to a model.

A :class:`WriteFollower` is called for each statement of the ORM that writes to the model on a
shard, inside the write's transaction. On request, it is also called for writes in databases that
are not shards. If it has work to do at the end of the transaction, it adds a :class:`CommitWatcher`
to the connection object.

This package must not import the parts that follow writes. So they register a function with
:func:`provide_followers` when their Django app is ready.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable


class WriteFollower(Protocol):
    """An object that is called for each statement of the ORM that writes rows of one model."""

    def concerns(self, query: Any) -> bool:
        """Whether this follower must be called (:meth:`write`) for the statement of ``query``.
        Sends nothing.

        If all followers return False, and the model is not cached, the statement is sent without a
        transaction of its own.
        """

    def write(self, compiler: Any, execute: Callable[[], Any]) -> Any:
        """Run the statement of ``compiler``, and return its result. Called while a transaction is
        open.

        If this method raises an error, the caller must roll the atomic block of the statement back.

        :param compiler: the compiler of the INSERT, UPDATE or DELETE.
        :param execute: compiles ``compiler.query`` and sends the statement. So this method may
            first change the query, for example to write to fewer rows.
        """


@runtime_checkable
class StatementFollower(WriteFollower, Protocol):
    """A follower that needs no transaction for a statement, if it can find out the id of the
    session before the statement is sent.
    """

    def needs_transaction(self, compiler: Any) -> bool:
        """Whether the follower needs an open transaction for the statement. Sends nothing.

        If False, :meth:`write` may be called in autocommit, provided that the model has no other
        follower and is not cached. The statement then commits by itself. Even before it is sent,
        ``session_id()`` of the connection object returns the id of its session.
        """


class CommitWatcher(Protocol):
    """An object that is told how one transaction of a connection object goes on and ends.

    It is in ``commit_watchers`` of the connection object. All its methods are called in the thread
    of the connection object.
    """

    def before_commit(self) -> None:
        """Called immediately before COMMIT. If this method raises an error, the transaction is
        rolled back.
        """

    def may_commit(self) -> None:
        """Called before a statement that may commit implicitly, such as ``ALTER TABLE`` on MySQL.
        The implicit commit stores everything that the transaction has written so far.
        """

    def savepoint(self, sid: str) -> None:
        """Called after the savepoint ``sid`` was set."""

    def savepoint_rolled_back(self, sid: str) -> None:
        """Called after a rollback to the savepoint ``sid``, which has undone everything since the
        savepoint was set.

        :param sid: id of the savepoint. If this watcher was added after the savepoint was set, it
            does not know the id. The rollback has then undone all writes that the watcher knows.
        """

    def ended(self, committed: bool | None) -> None:
        """Called once, after the transaction has ended. Must not raise errors.

        :param committed: True after COMMIT, False after a rollback, None if the outcome is not
            known.
        """


#: A function that returns the follower of a model, or None if nothing follows the model. It is
#: called for each write, so it must be cheap.
FollowerOf = Callable[[Any], WriteFollower | None]

_finders: list[FollowerOf] = []
_finders_everywhere: list[FollowerOf] = []


def provide_followers(follower_of: FollowerOf, *, everywhere: bool = False) -> None:
    """Register a function that returns the follower of a model: the object to call for each write
    to the model.

    :param everywhere: whether the followers that the function returns are also called for writes in
        databases that are not shards.
    """
    (_finders_everywhere if everywhere else _finders).append(follower_of)


def is_followed(model: Any, *, on_shard: bool) -> bool:
    """Whether any follower would be called for a write to ``model``, see :func:`followers_of`."""
    for find in _finders_everywhere:
        if find(model) is not None:
            return True
    if on_shard:
        for find in _finders:
            if find(model) is not None:
                return True
    return False


def is_read_only(model: Any) -> bool:
    """Return whether only this library writes rows of ``model``.

    Either a follower refuses all other writes, and has the attribute ``is_read_only``, with the
    value True; or the model has ``_is_written_by_library``. Pages for editing ask this before they
    offer what must not be done.
    """
    return getattr(model, "_is_written_by_library", False) or any(
        getattr(follower, "is_read_only", False) for follower in followers_of(model, on_shard=True)
    )


def followers_of(model: Any, *, on_shard: bool) -> list[WriteFollower]:
    """Return the followers of ``model``: the objects to call for each write to the model.

    :param model: the model, perhaps a historical one of a migration.
    :param on_shard: whether the database of the write is a shard.
    """
    finders = [*_finders, *_finders_everywhere] if on_shard else _finders_everywhere
    return [follower for find in finders if (follower := find(model)) is not None]
