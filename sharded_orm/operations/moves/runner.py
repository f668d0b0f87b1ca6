"""Move keys, abort moves, and repair interrupted moves. The operator's commands call these
functions.

Moves of a group's keys are a *run* in the journal, and only one process at a time can hold the run.
So no other process can move keys of the group meanwhile. If the process is killed, another process
can take over the run and end the moves, because a table records the phase of each move.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Final

from django.db import Error, connections

from sharded_orm import runtime
from sharded_orm.exceptions import LeaseLost, MoveFailed, MoveRefused, OperationHeld
from sharded_orm.operations.error_notes import with_notes
from sharded_orm.operations.exceptions import OperationStopped
from sharded_orm.operations.moves import preflight, record
from sharded_orm.operations.moves.group_keys import GroupKeys
from sharded_orm.operations.moves.key_mover import KeyMover
from sharded_orm.operations.moves.leftovers import remove_leftovers
from sharded_orm.operations.moves.plan import MovePlan, plan_moves
from sharded_orm.operations.moves.record import MoveRecord
from sharded_orm.operations.moves.request import KeyToMove, MoveOptions, MoveReport, NoProgress
from sharded_orm.operations.moves.shard_sessions import ShardSessions
from sharded_orm.operations.moves.tables import tables_of_group
from sharded_orm.operations.relations import batched
from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.conflicts import refuse_conflicts
from sharded_orm.operations.runs.farm import FarmProgress
from sharded_orm.operations.runs.rollout import Stopping
from sharded_orm.routing.placement_lease import now

logger = logging.getLogger("sharded_orm.operations")

KIND: Final = "move keys"
#: During a lease (``PLACEMENT_LEASE``), a process may remember the shard of a key. A move waits
#: until the lease ends on all processes, and for this number of seconds more, because the clocks of
#: two machines run at slightly different speeds.
MARGIN: Final = 1.0
#: A move has to wait until no process remembers the old shard of the key. During this wait, it
#: copies changed rows and checks whether it was aborted, at this interval in seconds.
FOLLOWED_EVERY: Final = 1.0
#: The number of moves that are announced at once. Until an announced key has moved, each use of it
#: costs a query of the directory (the table of each key's shard).
ANNOUNCED_AT_ONCE: Final = 100


def move_keys(
    group: str,
    keys: Iterable[Any],
    to: int | str,
    *,
    options: MoveOptions | None = None,
    progress: FarmProgress | None = None,
    stopping: Stopping | None = None,
) -> MoveReport:
    """Move all rows of keys to another shard, while the site reads and writes them (Yupoo, Y4).

    At every moment, exactly one shard owns a key and takes its writes. If this process is killed,
    call the function again: it first ends the unfinished moves, so that each key has all its rows
    on one shard, the old or the new one. Keys that are on the target already are skipped.

    :param keys: shard keys of ``group``, as values or as text.
    :param to: the number of the target, or ``"auto"``, which draws an open shard for each key.
    :raises MoveRefused: the keys cannot be moved. Every reason is listed, and nothing was changed.
    :raises OperationHeld: another process moves keys of the group.
    :raises InvalidShardKey: no row can have one of the keys.

    Costs about 40 statements per key, and one wait of ``PLACEMENT_LEASE`` seconds per 100 keys.
    """
    mover = _Run(group, options or MoveOptions(), progress or NoProgress(), stopping or Stopping())
    preflight.check_group(group)
    with journal.hold_run(KIND, group, {"to": to}) as run:
        mover.begin(run)
        try:
            plan = plan_moves(group, keys, to)
        except Exception as exc:
            if not record.in_flight(group).exists():
                run.finish("refused", str(exc))
            if isinstance(exc, MoveRefused) and mover.report.failures:
                raise MoveRefused([*exc.problems, *mover.report.problems()]) from exc
            raise
        mover.move(plan)
        mover.finish()
    return mover.report


def move_key(group: str, key: Any, *, to: int | str, options: MoveOptions | None = None) -> int:
    """Move all rows of one key to another shard, as :func:`move_keys` does. Return the new shard.

    :param key: the shard key, as a value, as text, or as the model instance to which it belongs.
    :raises MoveFailed: the key was not moved. The message says why.

    If the key was moved, but old rows or a fence (triggers that refuse writes of the key) could not
    be removed from its old shard, a warning is logged.
    """
    name = str(preflight.check_group(group).value(key))
    report = move_keys(group, [name], to, options=options)
    if name in report.failures:
        raise MoveFailed(report.failures[name])
    for why in report.unsettled.values():
        logger.warning("%s: %s", name, why)
    return int(report.moved.get(name, to))


def repair(group: str, *, options: MoveOptions | None = None) -> MoveReport:
    """End every unfinished move of ``group``. Remove old rows and fences that are not needed any
    more.

    A move whose target owns the key is completed; any other move is undone. So each key stays on
    the shard that owns it now. A fence is the set of triggers that refuse writes of a key.

    :param options: only ``kill`` has an effect.
    :raises OperationHeld: another process moves keys of the group now.
    """
    mover = _Run(group, options or MoveOptions(), NoProgress(), Stopping())
    preflight.check_group(group)
    with journal.hold_run(KIND, group, {"to": "repair"}) as run:
        mover.begin(run)
        mover.sweep(record.shards_of(group))
        mover.finish()
    return mover.report


def abort(group: str, keys: Iterable[Any] = ()) -> MoveReport:
    """Abort moves whose keys are still owned by their old shards. The keys stay where they are.

    This call removes the copied rows. But if another process works on the move, that process
    removes them, because it looks at the record of the move before each batch of rows. If the new
    shard owns a key already, the move of this key is not changed.

    :param keys: shard keys, as values or as text; by default all keys with an unfinished move.
    :raises OperationHeld: another operation is under way on the group, so the copied rows cannot be
        removed. Nothing was changed.
    """
    group_keys = preflight.check_group(group)
    texts = {group_keys.text(group_keys.value(key)) for key in keys}
    work = _Run(group, MoveOptions(), NoProgress(), Stopping())
    with ExitStack() as stack:
        try:
            run = stack.enter_context(journal.hold_run(KIND, group, {"to": "abort"}))
        except OperationHeld as exc:
            if work.mark_aborted(texts):
                work.report.notes.append(
                    "what was copied is removed by the process that moves it; if it does not,"
                    f" 'manage.py keys repair {group}' does. {str(exc).rstrip('.')}"
                )
            return work.report
        work.hold(run)
        work.recover(work.mark_aborted(texts))
        work.finish()
    return work.report


class _Run:
    """Moves keys of one group.

    The process holds the group's run in the journal, so no other process moves keys of the group.
    """

    def __init__(
        self, group: str, options: MoveOptions, progress: FarmProgress, stopping: Stopping
    ) -> None:
        self._group = group
        self._options = options
        self._progress = progress
        self._stopping = stopping
        self._tables = tables_of_group(group)
        self._lock = threading.Lock()
        self._run: Any = None
        #: The shards on which this process has worked. In the end, leftovers of moves are removed
        #: from them.
        self._shards: set[int] = set()
        self._repair = f"run 'manage.py keys repair {group}' when the cause is mended"
        self.report = MoveReport(group)

    def hold(self, run: journal.JournalRun) -> None:
        """Use ``run`` for the next moves. It is the group's run in the journal, whose lease this
        process holds.

        :raises OperationHeld: an operation is under way that must not overlap with moves of keys.
        """
        self._run, self.report.run = run, run.id
        refuse_conflicts(run)

    def begin(self, run: journal.JournalRun) -> None:
        """Use ``run`` for the next moves, and first end the moves that an earlier process has left
        unfinished.

        :raises OperationHeld: an operation is under way that must not overlap with moves of keys.
        """
        self.hold(run)
        self.recover(record.moves_in_flight(self._group))

    def mark_aborted(self, keys: set[str]) -> list[MoveRecord]:
        """Abort the unfinished moves whose keys are still owned by the old shard, and return them.

        :param keys: the keys, as the directory stores them (as texts). If empty, all such moves are
            aborted.
        """
        aborted = [
            move
            for move in record.moves_in_flight(self._group)
            if (not keys or move.key in keys) and move.abort("aborted by an operator")
        ]
        self.report.aborted += [move.text for move in aborted]
        return aborted

    def recover(self, moves: Sequence[MoveRecord]) -> None:
        """End moves that an earlier process has left unfinished.

        If the target owns the key already, the move is completed. Otherwise it is undone.
        """
        if not moves:
            return
        keys = GroupKeys(self._group)
        for move in moves:
            move.value = keys.stored(keys.value(move.text))
        if self._options.kill:
            self._end_sessions(moves)
        self._in_threads(moves, self._recover, self._not_recovered)

    def _end_sessions(self, moves: Sequence[MoveRecord]) -> None:
        """End the database sessions of the process that has left ``moves`` unfinished.

        That process may still live, for example if it was only paused. It must not write any more,
        because this process has taken over its run.
        """
        ended = 0
        with ShardSessions(self._group) as sessions:
            for move in moves:
                for shard in (move.source, move.target):
                    try:
                        ended += sessions.capture(shard).end_sessions(move.number)
                    except Error as exc:
                        self.report.notes.append(
                            f"sessions on shard {shard} were not ended ({journal.one_line(exc)})"
                        )
        if ended:
            self.report.notes.append(f"{ended} database sessions of a paused process were ended")

    def move(self, plan: MovePlan) -> None:
        self.report.notes += plan.notes
        self.report.already = plan.already
        self._run.note(keys=len(plan.keys))
        self._progress.begin(self._group, len(plan.keys))
        try:
            for batch in batched(plan.keys, ANNOUNCED_AT_ONCE):
                if self._stopping():
                    break
                self._move_batch(batch)
                self._run.note(moved=len(self.report.moved), failed=len(self.report.failures))
        finally:
            self._progress.end()
        self.report.stopped = self._stopping.cause
        ended = {*self.report.moved, *self.report.failures}
        self.report.left = sum(str(key.value) not in ended for key in plan.keys)

    def sweep(self, shards: Iterable[int]) -> None:
        """Make :meth:`finish` remove leftovers of moves also on ``shards``.

        Without this call, it removes them only on shards from or to which this process moves keys.
        """
        self._shards.update(shards)

    def finish(self) -> None:
        """Remove leftovers of moves, and then finish the run.

        The run is not finished if the group still has an unfinished move.
        """
        left = remove_leftovers(self._group, self._shards, kill=self._options.kill)
        self.report.notes += left.notes
        failures = self.report.failures
        if record.in_flight(self._group).exists():
            # A fence of an unfinished move may still refuse writes. Leave the run unfinished, so
            # that no migration of the group begins meanwhile.
            return
        if failures:
            self._run.finish("failed", f"{len(failures)} keys were not moved")
        else:
            self._run.finish("stopped" if self._stopping() else "done")

    def _move_batch(self, keys: Sequence[KeyToMove]) -> None:
        try:
            moves = self._announced(keys)
        except MoveRefused as exc:
            for key in keys:
                self._fail(str(key.value), f"not begun: {'; '.join(exc.problems)}")
            return
        announced_at = now()
        copied = self._in_threads(moves, KeyMover.prepare)
        # Other processes may remember the old shards of the keys until their leases end. Wait until
        # the last lease has ended. During the wait, copy the rows that the site changes.
        lease = runtime.config().placement_lease
        assert lease is not None
        while (left := announced_at + lease + MARGIN - now()) > 0 and not self._stopping():
            self._stopping.wait(min(left, FOLLOWED_EVERY))
            copied = self._in_threads(copied, KeyMover.catch_up)
        self._in_threads(copied, self._switch)

    def _announced(self, keys: Sequence[KeyToMove]) -> list[MoveRecord]:
        group_keys = GroupKeys(self._group)
        moves = record.announce(self._group, keys, self._options.keep)
        for move in moves:
            move.value = group_keys.stored(move.value)
        return moves

    def _switch(self, mover: KeyMover, move: MoveRecord) -> None:
        mover.switch(move)
        mover.settle(move)
        self._moved(mover, move)

    def _recover(self, mover: KeyMover, move: MoveRecord) -> None:
        try:
            if not mover.undo(move, f"broken off in the phase {move.phase!r}"):
                mover.settle(move)
        except MoveFailed:
            # The process that has begun the move was perhaps only paused, and has completed the
            # move meanwhile. Ignore the error in this case.
            if not move.was_settled():
                raise
        with self._lock:
            is_moved = move.phase == record.SETTLED
            self.report.recovered[move.text] = move.target if is_moved else move.source

    def _not_recovered(self, mover: KeyMover, move: MoveRecord, cause: Exception) -> None:
        self._fail(
            move.text,
            f"its move was broken off, and could not be ended ({with_notes(cause)})."
            f" Nothing is lost: {self._repair}",
        )

    def _in_threads(
        self,
        moves: Sequence[MoveRecord],
        work: Callable[[KeyMover, MoveRecord], None],
        on_error: Callable[[KeyMover, MoveRecord, Exception], None] | None = None,
    ) -> list[MoveRecord]:
        """Call ``work`` for each move, in several threads. Return the moves for which ``work``
        raised no error.

        :param on_error: called for each move for which ``work`` raised an error. By default, it
            completes the move if the target owns the key already; otherwise it undoes the move.
        """
        queue, succeeded = deque(moves), list[MoveRecord]()

        def worker() -> None:
            try:
                with ShardSessions(self._group) as sessions:
                    mover = KeyMover(
                        self._tables, self._options, sessions, self._stopping, self._run.check
                    )
                    while True:
                        with self._lock:
                            if not queue:
                                return
                            move = queue.popleft()
                        if self._attempt(mover, sessions, move, work, on_error or self._end):
                            with self._lock:
                                succeeded.append(move)
            except BaseException as exc:
                self._stopping.stop(type(exc).__name__)
                raise
            finally:
                connections.close_all()

        if not moves:
            return []
        count = max(1, min(self._options.workers, len(moves)))
        with ThreadPoolExecutor(count, thread_name_prefix="sharded_orm mover") as threads:
            futures = [threads.submit(worker) for _ in range(count)]
            for future in futures:
                # Wait until every thread has ended. Only then raise the error of one of them.
                future.exception()
        for future in futures:
            future.result()
        return succeeded

    def _attempt(
        self,
        mover: KeyMover,
        sessions: ShardSessions,
        move: MoveRecord,
        work: Callable[[KeyMover, MoveRecord], None],
        on_error: Callable[[KeyMover, MoveRecord, Exception], None],
    ) -> bool:
        self._shards |= {move.source, move.target}
        try:
            work(mover, move)
        except LeaseLost:
            raise
        except Exception as exc:
            # The error may come from a broken connection. Close all connections, so that
            # ``on_error`` gets new ones.
            sessions.close()
            connections[runtime.config().directory].close_if_unusable_or_obsolete()
            on_error(mover, move, exc)
            return False
        return True

    def _end(self, mover: KeyMover, move: MoveRecord, cause: Exception) -> None:
        """End a move that has raised an error.

        If the target owns the key already, the move is completed. Otherwise it is undone.
        """
        why = with_notes(cause)
        try:
            if mover.undo(move, why):
                if not isinstance(cause, OperationStopped):
                    self._fail(move.text, str(cause) if isinstance(cause, MoveFailed) else why)
                return
            mover.settle(move)
        except LeaseLost:
            raise
        except Exception as exc:
            again = with_notes(exc)
            if move.phase in (record.SWITCHED, record.SETTLED):
                self._moved(mover, move)
                with self._lock:
                    self.report.unsettled[move.text] = (
                        f"moved to shard {move.target}, but what is left on shard {move.source} or"
                        f" {move.target} could not be removed ({again}). Nothing is lost: {self._repair}"
                    )
            else:
                self._fail(
                    move.text,
                    f"{why}. The move was not ended either ({again}). Nothing is lost: {self._repair}",
                )
            return
        self._moved(mover, move)

    def _moved(self, mover: KeyMover, move: MoveRecord) -> None:
        with self._lock:
            self.report.rows += mover.rows
            if mover.pause:
                self.report.pauses.append(mover.pause)
            self.report.moved[move.text] = move.target
            self._progress.done(move.text, f"moved to shard {move.target}")

    def _fail(self, key: str, why: str) -> None:
        with self._lock:
            self.report.failures[key] = why
            self._progress.unit_failed(key, why)
