"""Transactions of a whole group: one block, as many shards as it touches.

``atomic(using="photos")`` opens nothing. Each shard opens its own transaction, and one
savepoint per nested block, when it is first used inside; all of them end with the
group's block. Commits run one after the other: there is no two-phase commit, and
:exc:`PartialCommitError` tells where a failure left the shards.
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

# A hook of Django's on_commit: (savepoint ids it was registered under, function, robust).
Hook = tuple[set[Any], Callable[[], object], bool]


@dataclass(eq=False, slots=True)
class Level:
    """An open block of the group: the outermost (no ``sid``) or a savepoint."""

    sid: str | None = None
    # A shard has released this savepoint already, so it cannot be rolled back alone.
    half_released: bool = False


class GroupTransactions(BaseDatabaseWrapper):
    """The transaction state of a group wrapper.

    Invariant: a shard is in ``participants`` exactly while it has mirrored at least the
    outermost of ``levels``.
    """

    levels: list[Level]
    participants: dict[str, GroupMember]
    _broken: set[str]
    _in_transaction: set[str]
    _orphaned_hooks: list[Hook]

    def init_transactions(self) -> None:
        self.levels = []
        self.participants = {}
        # Participants that need a rollback: then the whole group does.
        self._broken = set()
        # Shards that are in a transaction of any kind, the group's or their own.
        self._in_transaction = set()
        # Hooks of shards that had committed when another one failed.
        self._orphaned_hooks = []

    # ##### What shards tell #####

    def joined(self, wrapper: GroupMember) -> None:
        self.participants[wrapper.alias] = wrapper
        self.note_broken(wrapper.alias, wrapper.needs_rollback)

    def left(self, wrapper: GroupMember) -> None:
        if self.participants.pop(wrapper.alias, None) is not None:
            self._broken.discard(wrapper.alias)

    def note_broken(self, alias: str, broken: bool) -> None:
        (self._broken.add if broken else self._broken.discard)(alias)

    def note_transaction(self, alias: str, is_open: bool) -> None:
        (self._in_transaction.add if is_open else self._in_transaction.discard)(alias)

    def open_transactions(self) -> frozenset[str]:
        """Aliases of this thread's shards that are inside a transaction."""
        return frozenset(self._in_transaction)

    def block_options(self, level: Level) -> tuple[bool, bool]:
        """``durable`` and ``_from_testcase`` of the atomic block that made ``level``."""
        # Blocks without a savepoint are in both lists, too; in manual transaction
        # management the outermost level has no block.
        offset = len(self.atomic_blocks) - len(self.savepoint_ids)
        index = offset - 1 if level.sid is None else offset + self._savepoint_index(level.sid)
        if 0 <= index < len(self.atomic_blocks):
            block: Any = self.atomic_blocks[index]
            return block.durable, block._from_testcase
        return False, False

    def _savepoint_index(self, sid: str) -> int:
        # A savepoint made by transaction.savepoint() has no block.
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
            # Atomic clears the flag before it rolls back, users clear it on purpose.
            for alias in list(self._broken):
                self.participants[alias].needs_rollback = False
            self._broken.clear()

    # ##### Levels #####

    # With this method, Django's set_autocommit neither logs a BEGIN nor does anything
    # else to start a transaction.
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
        # Rolling back ends the levels inside and leaves this one open, and empty: the
        # shards open it again when they are used again.
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
        """Roll back every shard's levels from ``depth`` on; raise the first error at the end."""
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
            # Only in manual transaction management: Atomic would roll back.
            self.validate_no_broken_transaction()
        committed: list[str] = []
        waiting = list(self.participants.values())
        try:
            for wrapper in waiting:
                # On all shards before any commits: what cannot be told is committed nowhere.
                if wrapper.commits_with_group:
                    wrapper.announce_commit()
            for wrapper in waiting:
                wrapper.leave_group_levels(0, commit=True)
                committed.append(wrapper.alias)
        except BaseException as exc:
            self._give_up_commit(committed, [w.alias for w in waiting[len(committed) :]], exc)
            raise
        finally:
            self._reset_levels()

    def _give_up_commit(self, committed: list[str], rest: list[str], cause: BaseException) -> None:
        try:
            self._roll_back_to(0)
        except Exception:  # Logged: the error of the commit is on its way to the caller.
            logger.exception("rolling back %r after a failed commit", rest)
        # As BaseDatabaseWrapper.rollback(), which Atomic calls after an error of a database only.
        hooks: list[Any] = self.run_on_commit
        self.run_on_commit = []
        if committed:
            # Their rows are there for all to see, so what was to happen then must happen.
            marks = {(alias, None) for alias in committed}
            self._orphaned_hooks = [hook for hook in hooks if hook[0] & marks]
            if isinstance(cause, Exception):
                raise PartialCommitError(committed, rest, cause) from cause

    def _rollback(self) -> None:
        try:
            self._roll_back_to(0)
        finally:
            self._reset_levels()

    def _reset_levels(self) -> None:
        self.participants.clear()
        self._broken.clear()
        if self.levels:
            # Until autocommit is on again, a transaction is open after a commit, too.
            self._begin()

    def abandon_levels(self) -> None:
        """The group's wrapper was closed inside a transaction that has now ended."""
        try:
            self._roll_back_to(0)
        except Error:
            # Their connections were closed; there was nothing left to roll back.
            logger.debug("closing %r inside a transaction", self.alias, exc_info=True)
        self.participants.clear()
        self._broken.clear()
        self.levels.clear()

    # ##### on_commit #####

    def add_hook(self, wrapper: GroupMember, hook: Any) -> None:
        """Take over a hook of a shard; ``hook`` is its entry in ``run_on_commit``."""
        _, func, robust = hook
        sids: set[Any] = set(self.savepoint_ids)
        sids.update((wrapper.alias, sid) for sid in wrapper.savepoint_ids if sid is not None)
        sids.add((wrapper.alias, None))
        hooks: list[Any] = self.run_on_commit
        hooks.append((sids, func, robust))

    def forget_hooks(self, sid: object) -> None:
        """A shard rolled back to its savepoint ``sid``."""
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
