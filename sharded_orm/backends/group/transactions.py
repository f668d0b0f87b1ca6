"""Transactions of a whole shard group, such as ``atomic(using="photos")``.

An atomic block on a group opens no transaction at first. A shard opens a transaction when it is
first used in the block, with a savepoint for each nested block. At the end of the outermost block,
the shards commit one after the other: first those that were only read, then the others. If a shard
fails to commit, :exc:`PartialCommitError` says which shards had committed before. With a
coordinator, the shards commit together instead: see :mod:`sharded_orm.backends.two_phase`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.db import Error, OperationalError, ProgrammingError
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError

from sharded_orm.backends.features import features_of
from sharded_orm.backends.group.contract import GroupCoordinator, GroupMember
from sharded_orm.exceptions import PartialCommitError

logger = logging.getLogger("sharded_orm.backends.group")

# A function that was registered with on_commit, as Django keeps it in ``run_on_commit``: a tuple
# (ids of the savepoints that were open at the registration, function, argument ``robust``).
Hook = tuple[set[Any], Callable[[], object], bool]


@dataclass(eq=False, slots=True)
class Level:
    """An open block of a group's transaction: the outermost block (``sid`` is None), or a savepoint."""

    sid: str | None = None
    # True if some shards have released this savepoint before another shard failed to release it.
    # The group cannot roll back to the savepoint any more, because it is gone on the first shards.
    half_released: bool = False


class GroupTransactions(BaseDatabaseWrapper):
    """Base class of a group's connection object: keeps track of the group's open transaction, and
    commits it or rolls it back.

    ``levels`` lists the open blocks of the transaction, outermost first. ``participants`` maps the
    alias of each shard in the transaction to its connection object. Invariant: a participant has
    opened a block of its own at least for the outermost level.
    """

    levels: list[Level]
    participants: dict[str, GroupMember]
    #: True after the program has named a savepoint that does not exist, if the shards are on
    #: PostgreSQL. There, a failed statement ends its transaction. So the program can then only roll
    #: back the transaction, or roll back to an existing savepoint.
    _missed_savepoint: bool
    _broken: set[str]
    _in_transaction: set[str]
    _orphaned_hooks: list[Hook]
    #: Values that upper layers keep as long as a transaction of the group, or of one of its shards,
    #: is open. When none is open any more, they are dropped.
    transaction_memory: dict[str, Any]
    #: The object that commits the transaction on all shards, for example in two phases. If None,
    #: the shards commit one after the other.
    coordinator: GroupCoordinator | None = None

    def init_transactions(self) -> None:
        self.transaction_memory = {}
        self.levels = []
        self.participants = {}
        self._missed_savepoint = False
        # Aliases of the shards in the group's transaction that must be rolled back. If there are
        # any, the whole transaction must be rolled back.
        self._broken = set()
        # Aliases of the shards that have an open transaction. It is a part of the group's
        # transaction, or was begun on the shard alone.
        self._in_transaction = set()
        # If a commit fails on one shard after others have committed, this keeps the on_commit
        # functions of the committed shards. They run when autocommit is switched on again.
        self._orphaned_hooks = []

    # ##### Reports from shards #####

    def add_participant(self, wrapper: GroupMember) -> None:
        is_new = wrapper.alias not in self.participants
        self.participants[wrapper.alias] = wrapper
        self.record_broken(wrapper.alias, wrapper.needs_rollback)
        if is_new and self.coordinator is not None:
            try:
                self.coordinator.join(wrapper)
            except BaseException:
                # The shard could not join, so its writes would be missing. Mark the transaction as
                # in need of a rollback, so that nothing is committed even if the program catches
                # the error.
                wrapper.needs_rollback = True
                raise

    def remove_participant(self, wrapper: GroupMember) -> None:
        if self.participants.pop(wrapper.alias, None) is not None:
            self._broken.discard(wrapper.alias)

    def record_broken(self, alias: str, broken: bool) -> None:
        (self._broken.add if broken else self._broken.discard)(alias)

    def record_transaction(self, alias: str, is_open: bool) -> None:
        (self._in_transaction.add if is_open else self._in_transaction.discard)(alias)
        if self.transaction_memory and not self.is_in_transaction():
            self.transaction_memory.clear()

    def is_in_transaction(self) -> bool:
        """Whether a transaction of the group, or of one of its shards, is open in this thread."""
        return bool(self.levels or self._in_transaction)

    def open_transactions(self) -> frozenset[str]:
        """Return the aliases of the group's shards that are in a transaction in this thread."""
        return frozenset(self._in_transaction)

    def block_options(self, level: Level) -> tuple[bool, bool]:
        """Return the options ``durable`` and ``_from_testcase`` of the atomic block that opened
        ``level``.

        A shard that joins the transaction passes them on to its own block. Both are False if no
        atomic block opened the level, but for example ``transaction.savepoint()``.
        """
        # Find the block by the index of its savepoint in savepoint_ids. Usually savepoint_ids has
        # an entry for each atomic block but the outermost one, so the indexes differ by 1. (The
        # entry of a block without a savepoint is None.) But if the user has switched autocommit off
        # by hand, even the outermost block is a savepoint, so each block has an entry.
        offset = len(self.atomic_blocks) - len(self.savepoint_ids)
        index = offset - 1 if level.sid is None else offset + self._savepoint_index(level.sid)
        if 0 <= index < len(self.atomic_blocks):
            block: Any = self.atomic_blocks[index]
            return block.durable, block._from_testcase
        return False, False

    def _savepoint_index(self, sid: str) -> int:
        # transaction.savepoint() makes a savepoint without an atomic block. Return an index past
        # the end of atomic_blocks for it.
        return (
            self.savepoint_ids.index(sid) if sid in self.savepoint_ids else len(self.atomic_blocks)
        )

    # ##### Rollback flag #####

    @property
    def needs_rollback(self) -> bool:
        return self._needs_rollback or bool(self._broken)

    @needs_rollback.setter
    def needs_rollback(self, value: bool) -> None:
        self._needs_rollback = value
        if not value and self._broken:
            # Clearing the group's flag clears the flag of each shard. Django's Atomic clears the
            # group's flag before it rolls back, and users may clear it by set_rollback(False).
            for alias in list(self._broken):
                self.participants[alias].needs_rollback = False
            self._broken.clear()

    def validate_no_broken_transaction(self) -> None:
        super().validate_no_broken_transaction()
        if self._missed_savepoint:
            raise TransactionManagementError(
                f"A savepoint that does not exist was named in this transaction of {self.alias!r}."
                " Its database refuses statements after an error, so this block stores nothing on"
                " any shard. If the program catches the error, put the call into a block of its own:"
                f" atomic(using={self.alias!r})."
            )

    # ##### Levels #####

    # Django's set_autocommit() calls a method of this name, if there is one, to begin a
    # transaction. Without it, Django would write BEGIN to the query log, although a group sends no
    # BEGIN.
    def _start_transaction_under_autocommit(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.levels[:] = [Level()]

    def _set_autocommit(self, autocommit: bool) -> None:
        if not autocommit:
            self._begin()
            return
        if self.participants or self._missed_savepoint:
            # Do what one database of this kind does if autocommit is switched on in an open
            # transaction: MariaDB commits the transaction, and PostgreSQL's driver refuses.
            if not features_of(self).autocommit_commits:
                raise ProgrammingError(
                    f"Autocommit of {self.alias!r} cannot be switched on, because a transaction is"
                    f" open on its shards. Call transaction.commit(using={self.alias!r}) or"
                    " rollback() first."
                )
            self._commit()
        self._end_levels()

    def _savepoint_allowed(self) -> bool:
        return not self.autocommit

    def _savepoint(self, sid: str) -> None:
        self.validate_no_broken_transaction()
        self.levels.append(Level(sid))

    def _savepoint_rollback(self, sid: str) -> None:
        if self.needs_rollback:
            # Refuse the rollback only if needs_rollback is set. If only _missed_savepoint is set,
            # the program repairs the transaction by this rollback, so let it through.
            self.validate_no_broken_transaction()
        depth = self._depth_of(sid)
        self._missed_savepoint = False
        # As in one database, the group's savepoint still exists after a rollback to it; only the
        # blocks inside it have ended. So levels[depth] stays. The savepoints of the shards,
        # however, end here. Each shard makes a new one when it is used again.
        half_released = any(level.half_released for level in self.levels[: depth + 1])
        self._roll_back_to(depth)
        del self.levels[depth + 1 :]
        if half_released:
            # Some shards keep their rows. So nothing may be committed, even if the program catches
            # the error.
            self.needs_rollback = True
            raise OperationalError(
                f"Savepoint {sid!r} of {self.alias!r} cannot be rolled back: some shards had"
                " released it before another one failed to. The outer block has to roll back."
            )

    def _savepoint_commit(self, sid: str) -> None:
        self.validate_no_broken_transaction()
        depth = self._depth_of(sid)
        released = False
        for wrapper in list(self.participants.values()):
            try:
                wrapper.leave_group_levels(depth, commit=True)
            except BaseException:
                self.levels[depth].half_released = released
                raise
            released = True
        del self.levels[depth:]

    def _depth_of(self, sid: str) -> int:
        for depth, level in enumerate(self.levels):
            if level.sid == sid:
                return depth
        # The group sends no statement here. But on a single PostgreSQL database, the statement with
        # the unknown savepoint would end the transaction. So remember that this one is unusable.
        self._missed_savepoint = features_of(self).errors_end_transactions
        raise OperationalError(f"Savepoint {sid!r} of {self.alias!r} does not exist.")

    def _roll_back_to(self, depth: int) -> None:
        """Roll back the open blocks ``levels[depth:]`` of the group on every shard.

        An error on one shard does not stop the rollback on the others. Afterwards, the first error
        is raised.
        """
        first: BaseException | None = None
        for wrapper in reversed(list(self.participants.values())):
            try:
                wrapper.leave_group_levels(depth, commit=False)
            except Exception as exc:
                # Catch every error, so that the other shards are rolled back nevertheless. The
                # first error is raised after the loop; log the others.
                if first is not None:
                    logger.exception("rolling back %r after another shard", wrapper.alias)
                first = first or exc
        if first is not None:
            raise first

    # ##### Outermost level #####

    def _commit(self) -> None:
        # Atomic does not commit if needs_rollback is set, but does not know of a missing savepoint.
        # And if autocommit was switched off by hand, there is no Atomic. So check both here.
        self.validate_no_broken_transaction()
        committed: set[str] = set()
        participants = list(self.participants.values())
        try:
            self._refuse_failed(participants)
            for wrapper in participants:
                # Announce the writes of all shards to the cache before the first shard commits. If
                # the cache does not answer, this fails, and no shard commits.
                if wrapper.commits_with_group:
                    wrapper.announce_commit()
            if self.coordinator is not None:
                self.coordinator.commit(participants)
            else:
                self._commit_each(participants, committed)
        except BaseException as exc:
            aliases = [wrapper.alias for wrapper in participants]
            self._abort_commit(
                [alias for alias in aliases if alias in committed],
                [alias for alias in aliases if alias not in committed],
                exc,
            )
            raise
        finally:
            self._reset_levels()

    def _commit_each(self, participants: list[GroupMember], committed: set[str]) -> None:
        """Commit the shards one after the other.

        :param participants: the connection objects of the shards, in the order of their first use.
        :param committed: an empty set, to which the aliases of the committed shards are added.
            Shards that were only read are added after the first commit of a shard with writes. So
            if a commit fails while the set is empty, nothing was stored.
        """
        for wrapper in participants:
            if wrapper.commits_with_group and wrapper.has_lost_session:
                # The session of this shard is known to be lost, so its commit raises an error,
                # without a round trip. Do it first, so that nothing is committed on other shards.
                wrapper.leave_group_levels(0, commit=True)
        readers = [wrapper for wrapper in participants if wrapper.reads_as_autocommit()]
        writers = [wrapper for wrapper in participants if wrapper not in readers]
        # If the server has closed the session of a shard, its commit will fail. So let such a shard
        # commit before the others, so that nothing is stored on any shard.
        writers.sort(key=lambda wrapper: not wrapper.seems_lost)
        for wrapper in [wrapper for wrapper in writers if wrapper.commits_with_group][1:]:
            # Check deferred constraints before any of the writers commits, so that a violation
            # prevents all commits. The first writer needs no check, because nothing is committed
            # before its commit.
            wrapper.check_deferred_constraints()
        for wrapper in readers:
            # Commit the shards that were only read first. An error in one of these commits is
            # harmless, because nothing was stored yet.
            wrapper.leave_group_levels(0, commit=True)
        for wrapper in writers:
            wrapper.leave_group_levels(0, commit=True)
            if not committed:
                committed.update(reader.alias for reader in readers)
            committed.add(wrapper.alias)

    def _refuse_failed(self, participants: list[GroupMember]) -> None:
        """Raise an error if the transaction of one shard is lost, because a statement in it has
        failed. Otherwise, the other shards would commit.

        The program has caught the error of the statement, and gone on. The server has already
        rolled back the shard's transaction, or will answer its COMMIT by a rollback, without an
        error. In one database, all writes of the block would be lost. So no shard must commit here.
        """
        writers = [w for w in participants if w.commits_with_group and not w.reads_as_autocommit()]
        failed = [w.alias for w in writers if w.has_failed]
        if failed and any(not (w.has_failed or w.has_lost_session) for w in writers):
            raise TransactionManagementError(
                f"A statement has failed in the transaction of {failed[0]!r}, so this block of"
                f" {self.alias!r} has stored nothing on any shard. If the program catches the error of a"
                f" statement, put the statement into a block of its own: atomic(using={self.alias!r})."
            )

    def _abort_commit(
        self, committed: list[str], uncommitted: list[str], cause: BaseException
    ) -> None:
        self._missed_savepoint = False
        try:
            self._roll_back_to(0)
        except Exception:
            # Only log this error: the caller receives the error of the commit.
            logger.exception("rolling back %r after a failed commit", uncommitted)
        # Drop the on_commit functions, as BaseDatabaseWrapper.rollback() does. Atomic calls
        # rollback() only after a DatabaseError, but the commit may have raised another error. So do
        # it here.
        hooks: list[Any] = self.run_on_commit
        self.run_on_commit = []
        if committed:
            # The rows of the committed shards are visible to others. So the on_commit functions
            # that were registered on these shards must run. Keep them for set_autocommit(), which
            # calls them.
            transactions = {(alias, None) for alias in committed}
            self._orphaned_hooks = [hook for hook in hooks if hook[0] & transactions]
            if isinstance(cause, Exception):
                raise PartialCommitError(committed, uncommitted, cause) from cause

    def _rollback(self) -> None:
        self._missed_savepoint = False
        try:
            self._roll_back_to(0)
        finally:
            self._reset_levels()

    def _reset_levels(self) -> None:
        self.participants.clear()
        self._broken.clear()
        if self.levels:
            self._end_levels()
            # Autocommit is still off, so the next transaction begins at once.
            self._begin()

    def _end_levels(self) -> None:
        self.levels.clear()
        self._missed_savepoint = False
        if not self._in_transaction:
            self.transaction_memory.clear()

    def abandon_levels(self) -> None:
        """Roll back the group's transaction on all its shards, after the group's connection was
        closed inside the transaction.
        """
        self._missed_savepoint = False
        try:
            self._roll_back_to(0)
        except Error:
            # The connections of the shards are closed, too, so their servers have already rolled
            # back. Ignore the error that a closed connection raises here.
            logger.debug("closing %r inside a transaction", self.alias, exc_info=True)
        self.participants.clear()
        self._broken.clear()
        self._end_levels()

    # ##### on_commit #####

    def add_hook(self, wrapper: GroupMember, hook: Any) -> None:
        """Run a function later that the user has registered with ``on_commit`` on a shard.

        The group runs it after its outermost block, when the last shard has committed.

        :param wrapper: the shard's connection object.
        :param hook: the function's entry in the shard's ``run_on_commit``.
        """
        _, func, robust = hook
        sids: set[Any] = set(self.savepoint_ids)
        sids.update((wrapper.alias, sid) for sid in wrapper.savepoint_ids if sid is not None)
        sids.add((wrapper.alias, None))
        hooks: list[Any] = self.run_on_commit
        hooks.append((sids, func, robust))

    def forget_hooks(self, sid: object) -> None:
        """Drop the ``on_commit`` functions that were registered inside a savepoint of a shard,
        because the shard has rolled back to this savepoint.

        :param sid: a pair (the shard's alias, the savepoint's id).
        """
        if self.run_on_commit:
            self.run_on_commit = [hook for hook in self.run_on_commit if sid not in hook[0]]

    def set_autocommit(self, autocommit: bool, *args: Any, **kwargs: Any) -> None:
        super().set_autocommit(autocommit, *args, **kwargs)
        if autocommit and self._orphaned_hooks:
            hooks, self._orphaned_hooks = self._orphaned_hooks, []
            for _, func, _ in hooks:
                try:
                    func()
                except Exception:
                    # A function of the project may raise any error. Only log it: the other
                    # functions must be called, too, and the caller shall receive
                    # PartialCommitError.
                    logger.exception("calling %r, a hook of on_commit", func)
