"""Transactions of a whole group: one block over all shards that it uses.

``atomic(using="photos")`` opens nothing at first. Each shard opens its own transaction, and one
savepoint per nested block, when it is first used inside. All of them end with the group's block.
They commit one after the other: there is no two-phase commit, and :exc:`PartialCommitError` says
which shards had committed when one failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.db import Error, OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper

from sharded_orm.backends.group.contract import GroupMember
from sharded_orm.exceptions import PartialCommitError

logger = logging.getLogger("sharded_orm.backends.group")

# A hook of Django's on_commit: the ids of the savepoints around it, the function, robust.
Hook = tuple[set[Any], Callable[[], object], bool]


@dataclass(eq=False, slots=True)
class Level:
    """An open block of the group's transaction: the outermost one (no ``sid``), or a savepoint."""

    sid: str | None = None
    # Some shard has already released this savepoint, so the group cannot roll back to it.
    half_released: bool = False


class GroupTransactions(BaseDatabaseWrapper):
    """The state of the transaction of a group's connection object.

    Invariant: a shard is in ``participants`` exactly while it has opened at least the outermost of
    ``levels``.
    """

    levels: list[Level]
    participants: dict[str, GroupMember]
    _broken: set[str]
    _in_transaction: set[str]
    _orphaned_hooks: list[Hook]

    def init_transactions(self) -> None:
        self.levels = []
        self.participants = {}
        # Participants that need a rollback; then the whole group does.
        self._broken = set()
        # Shards in a transaction, the group's or their own.
        self._in_transaction = set()
        # Hooks of shards that had committed when another shard failed.
        self._orphaned_hooks = []

    # ##### What shards report #####

    def add_participant(self, wrapper: GroupMember) -> None:
        self.participants[wrapper.alias] = wrapper
        self.record_broken(wrapper.alias, wrapper.needs_rollback)

    def remove_participant(self, wrapper: GroupMember) -> None:
        if self.participants.pop(wrapper.alias, None) is not None:
            self._broken.discard(wrapper.alias)

    def record_broken(self, alias: str, broken: bool) -> None:
        (self._broken.add if broken else self._broken.discard)(alias)

    def record_transaction(self, alias: str, is_open: bool) -> None:
        (self._in_transaction.add if is_open else self._in_transaction.discard)(alias)

    def open_transactions(self) -> frozenset[str]:
        """Return the aliases of this thread's shards that are inside a transaction."""
        return frozenset(self._in_transaction)

    def block_options(self, level: Level) -> tuple[bool, bool]:
        """Return ``durable`` and ``_from_testcase`` of the atomic block that opened ``level``."""
        # Blocks without a savepoint are in both lists, too. In manual transaction management the
        # outermost level has no block.
        offset = len(self.atomic_blocks) - len(self.savepoint_ids)
        index = offset - 1 if level.sid is None else offset + self._savepoint_index(level.sid)
        if 0 <= index < len(self.atomic_blocks):
            block: Any = self.atomic_blocks[index]
            return block.durable, block._from_testcase
        return False, False

    def _savepoint_index(self, sid: str) -> int:
        # A savepoint of transaction.savepoint() has no block.
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
            # Atomic clears the flag before it rolls back; users clear it on purpose.
            for alias in list(self._broken):
                self.participants[alias].needs_rollback = False
            self._broken.clear()

    # ##### Levels #####

    # Django's set_autocommit calls this method if it exists, and then neither logs a BEGIN nor
    # starts a transaction in another way.
    def _start_transaction_under_autocommit(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.levels[:] = [Level()]

    def _set_autocommit(self, autocommit: bool) -> None:
        if not autocommit:
            self._begin()
            return
        if self.participants:
            # Turning autocommit on commits, as in any database.
            self._commit()
        self.levels.clear()

    def _savepoint_allowed(self) -> bool:
        return not self.autocommit

    def _savepoint(self, sid: str) -> None:
        self.validate_no_broken_transaction()
        self.levels.append(Level(sid))

    def _savepoint_rollback(self, sid: str) -> None:
        self.validate_no_broken_transaction()
        depth = self._depth_of(sid)
        # This level stays open and those inside it end. Shards open it again when they are used.
        half_released = any(level.half_released for level in self.levels[depth:])
        self._roll_back_to(depth)
        del self.levels[depth + 1 :]
        if half_released:
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
        raise OperationalError(f"Savepoint {sid!r} of {self.alias!r} does not exist.")

    def _roll_back_to(self, depth: int) -> None:
        """Roll back the levels from ``depth`` on, on every shard; raise the first error at the end."""
        first: BaseException | None = None
        for wrapper in reversed(list(self.participants.values())):
            try:
                wrapper.leave_group_levels(depth, commit=False)
            except Exception as exc:  # Each shard is rolled back; the first error is raised below.
                if first is not None:
                    logger.exception("rolling back %r after another shard", wrapper.alias)
                first = first or exc
        if first is not None:
            raise first

    # ##### Outermost level #####

    def _commit(self) -> None:
        if self.needs_rollback:
            # Only in manual transaction management: Atomic rolls back.
            self.validate_no_broken_transaction()
        committed: list[str] = []
        participants = list(self.participants.values())
        try:
            for wrapper in participants:
                # On all shards before one commits: if the cache does not answer, none commits.
                if wrapper.commits_with_group:
                    wrapper.announce_commit()
            for wrapper in participants:
                wrapper.leave_group_levels(0, commit=True)
                committed.append(wrapper.alias)
        except BaseException as exc:
            uncommitted = [wrapper.alias for wrapper in participants[len(committed) :]]
            self._abort_commit(committed, uncommitted, exc)
            raise
        finally:
            self._reset_levels()

    def _abort_commit(
        self, committed: list[str], uncommitted: list[str], cause: BaseException
    ) -> None:
        try:
            self._roll_back_to(0)
        except Exception:  # Logged: the error of the commit is on its way to the caller.
            logger.exception("rolling back %r after a failed commit", uncommitted)
        # As BaseDatabaseWrapper.rollback(), which Atomic calls only after an error of a database.
        hooks: list[Any] = self.run_on_commit
        self.run_on_commit = []
        if committed:
            # Their rows are visible to everybody, so the hooks that wait for them must run.
            transactions = {(alias, None) for alias in committed}
            self._orphaned_hooks = [hook for hook in hooks if hook[0] & transactions]
            if isinstance(cause, Exception):
                raise PartialCommitError(committed, uncommitted, cause) from cause

    def _rollback(self) -> None:
        try:
            self._roll_back_to(0)
        finally:
            self._reset_levels()

    def _reset_levels(self) -> None:
        self.participants.clear()
        self._broken.clear()
        if self.levels:
            # While autocommit is off, the next transaction begins at once.
            self._begin()

    def abandon_levels(self) -> None:
        """End the levels of a transaction in which the group's connection was closed."""
        try:
            self._roll_back_to(0)
        except Error:
            # Closing their connections has rolled them back.
            logger.debug("closing %r inside a transaction", self.alias, exc_info=True)
        self.participants.clear()
        self._broken.clear()
        self.levels.clear()

    # ##### on_commit #####

    def add_hook(self, wrapper: GroupMember, hook: Any) -> None:
        """Take over a hook of ``on_commit`` of a shard.

        :param hook: its entry in the shard's ``run_on_commit``.
        """
        _, func, robust = hook
        sids: set[Any] = set(self.savepoint_ids)
        sids.update((wrapper.alias, sid) for sid in wrapper.savepoint_ids if sid is not None)
        sids.add((wrapper.alias, None))
        hooks: list[Any] = self.run_on_commit
        hooks.append((sids, func, robust))

    def forget_hooks(self, sid: object) -> None:
        """Drop the hooks of savepoint ``sid``, to which a shard has rolled back."""
        if self.run_on_commit:
            self.run_on_commit = [hook for hook in self.run_on_commit if sid not in hook[0]]

    def set_autocommit(self, autocommit: bool, *args: Any, **kwargs: Any) -> None:
        super().set_autocommit(autocommit, *args, **kwargs)
        if autocommit and self._orphaned_hooks:
            hooks, self._orphaned_hooks = self._orphaned_hooks, []
            for _, func, _ in hooks:
                try:
                    func()
                except Exception:  # Logged, as a robust hook's: PartialCommitError is on its way.
                    logger.exception("calling %r, a hook of on_commit", func)
