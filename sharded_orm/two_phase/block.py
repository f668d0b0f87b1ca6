"""The atomic block of a shard group whose shards commit in two phases."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from django.db import OperationalError, connections, transaction

from sharded_orm.backends.two_phase.coordinator import Coordinator
from sharded_orm.exceptions import TwoPhaseMisused, TwoPhaseUnavailable
from sharded_orm.models.moves.confirmation import refuse_repetition
from sharded_orm.models.moves.transactions import moves_keys_now
from sharded_orm.two_phase.app import APP, is_enabled, refusal_of
from sharded_orm.two_phase.branch_watch import watch


class TwoPhaseAtomic(transaction.Atomic):
    """An atomic block on a shard group. All shards that are used in the block commit, or none does.

    If an instance is used as a decorator, each call of the decorated function looks the shards up
    again.

    :param find: returns the aliases of the shards whose rows were passed to ``atomic()``. None of
        these rows may move to another shard while the block begins.
    """

    def __init__(
        self, group: str, find: Callable[[], Sequence[str]], savepoint: bool, durable: bool
    ) -> None:
        super().__init__(group, savepoint, durable)
        self._group, self._find, self._durable = group, find, durable
        # Has one item for each open ``with`` block of this object. The item is True if the block
        # has created the group's coordinator, the object that runs the commit in two phases. Only
        # the outermost block creates a coordinator.
        self._makers: list[bool] = []

    def _recreate_cm(self) -> TwoPhaseAtomic:
        # The base class contextlib.ContextDecorator calls this method for each call of the
        # decorated function, so that each call gets an object of its own.
        return TwoPhaseAtomic(self._group, self._find, self.savepoint, self._durable)

    def __enter__(self) -> None:
        group: Any = connections[self._group]
        is_outermost = group.coordinator is None and not _is_in_test_case(group)
        if is_outermost:
            self._refuse_ordinary_block(group)
            watch.look()
            group.coordinator = Coordinator(watch.note)
        self._makers.append(is_outermost)
        try:
            aliases = self._find()
            super().__enter__()
        except BaseException:
            self._drop_coordinator()
            raise
        if not moves_keys_now(self._group):
            return
        try:
            # Look up the shards of the rows again, now inside the transaction. If they differ from
            # the shards before the transaction, a row has moved in between. After this look-up, the
            # transaction uses each key on the same shard until its end.
            if self._find() != aliases:
                refuse_repetition(self._group)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def __exit__(self, *exc_info: Any) -> None:
        if isinstance(exc_info[1], OperationalError):
            # Perhaps this block has waited in vain for a lock of a prepared branch (the part on one
            # shard of another transaction), whose process has died. Let the next block look for
            # such branches on the shards of this block.
            coordinator: Any = connections[self._group].coordinator  # type: ignore[attr-defined]
            watch.note(coordinator.shards if coordinator is not None else (), True)
        try:
            super().__exit__(*exc_info)
        finally:
            self._drop_coordinator()

    def _drop_coordinator(self) -> None:
        if self._makers.pop():
            group: Any = connections[self._group]
            group.coordinator = None

    def _refuse_ordinary_block(self, group: Any) -> None:
        if refusal := refusal_of(self._group):
            raise TwoPhaseUnavailable(
                f"Group {self._group!r} cannot commit in two phases: {refusal}."
            )
        if not is_enabled():
            raise TwoPhaseUnavailable(
                f"Group {self._group!r} cannot commit in two phases, because the shards have no table of"
                f" decisions: add {APP!r} to INSTALLED_APPS, and run 'manage.py migrate_shards'."
            )
        if group.is_in_transaction():
            raise TwoPhaseMisused(
                f"A block with two_phase=True cannot begin in an open transaction of group"
                f" {self._group!r}, which would commit one shard after the other. Give the outermost"
                " block two_phase=True."
            )


def _is_in_test_case(group: Any) -> bool:
    """Whether a ``TestCase`` has opened all open transactions of ``group``.

    If so, they never commit, because the test case rolls them back.
    """
    blocks = group.atomic_blocks if group.in_atomic_block else []
    return bool(blocks) and all(block._from_testcase for block in blocks)
