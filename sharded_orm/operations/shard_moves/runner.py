"""Move shards to other nodes, and end interrupted moves. The commands call these functions.

Only one process at a time can move shards of a group, because it must hold the group's run in the
journal. It moves one shard after the other. If it is killed during a move, the next process first
ends this move: it completes or undoes the move.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

from django.db import Error

from sharded_orm import runtime
from sharded_orm.exceptions import LeaseLost, MoveFailed
from sharded_orm.operations.error_notes import with_notes
from sharded_orm.operations.exceptions import OperationStopped
from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.conflicts import refuse_conflicts
from sharded_orm.operations.runs.rollout import Stopping
from sharded_orm.operations.shard_change import note_on_followers
from sharded_orm.operations.shard_moves import preflight
from sharded_orm.operations.shard_moves.leftovers import remove_expired
from sharded_orm.operations.shard_moves.plan import ShardMovePlan, ShardToMove, plan_shard_moves
from sharded_orm.operations.shard_moves.record import PUBLISHING, ShardMoveRecord
from sharded_orm.operations.shard_moves.replicated_mover import ReplicatedShardMover
from sharded_orm.operations.shard_moves.request import ShardMoveOptions, ShardMoveReport, Tell
from sharded_orm.operations.shard_moves.runs_under_way import KIND
from sharded_orm.operations.shard_moves.shard_mover import ShardMover
from sharded_orm.operations.shard_moves.shard_sessions import SchemaSessions

#: A process undoes the move of another process that has been silent, for example because it was
#: paused. When the paused process continues, it may create the shard's schema on the target, before
#: it notices that it has lost the run. So the first run that begins more than this time after the
#: undo looks for such a schema, and drops it.
LATE_SCHEMA: Final = timedelta(hours=1)


def move_shards(
    group: str,
    numbers: Sequence[int],
    to: str,
    *,
    replica: str | None = None,
    by_replication: bool = False,
    options: ShardMoveOptions | None = None,
    stopping: Stopping | None = None,
    tell: Tell = lambda line: None,
) -> ShardMoveReport:
    """Move shards of ``group`` to the node ``to``, while the site reads and writes them.

    When a shard is switched to its new node, statements on it wait for some milliseconds. At no
    time can it be used on both nodes. If this process is killed, call the function again: it first
    ends the unfinished move.

    :param numbers: the numbers of the shards. They are moved one after the other.
    :param replica: the node that becomes the replica of the moved shards; see
        :func:`~sharded_orm.operations.shard_moves.plan.plan_shard_moves`.
    :param by_replication: whether ``to`` is a replica of the server on which the shards are, so
        that their rows need not be copied.
    :param tell: called with a line for the operator.
    :raises MoveRefused: the shards cannot be moved. Every reason is listed, and nothing was
        changed.
    :raises TopologyReadOnly: commands cannot change the topology.
    :raises TopologyError: the source of the topology does not answer.
    :raises OperationHeld: another process moves shards of the group, or an operation is under way
        during which no shard may be moved.

    Costs about three statements per 2,000 rows and 20 per table, and a publication for each shard.
    """
    options = options or ShardMoveOptions()
    with journal.hold_run(KIND, group, {"to": to, "shards": list(numbers)}) as run:
        work = _Work(run, options, stopping or Stopping(), tell)
        work.begin()
        try:
            runtime.refresh()
            plan = plan_shard_moves(group, numbers, to, replica, by_replication=by_replication)
            preflight.check_plan(plan, options.patience)
        except Exception as exc:
            run.finish("refused", journal.one_line(exc))
            raise
        work.move(plan)
        work.finish()
    return work.report


def check_shard_moves(
    group: str,
    numbers: Sequence[int],
    to: str,
    replica: str | None = None,
    *,
    by_replication: bool = False,
    options: ShardMoveOptions | None = None,
) -> ShardMovePlan:
    """Return what :func:`move_shards` would do. Moves nothing.

    :raises: the errors of :func:`move_shards`, except :exc:`OperationHeld`.
    """
    runtime.refresh()
    plan = plan_shard_moves(group, numbers, to, replica, by_replication=by_replication)
    preflight.check_plan(plan, (options or ShardMoveOptions()).patience)
    return plan


def repair(
    group: str,
    *,
    discard: bool = False,
    kill: bool = False,
    tell: Tell = lambda line: None,
) -> ShardMoveReport:
    """End an unfinished move, and drop the old tables of earlier moves when their time is over.

    If the topology with the new node was published, the shard stays on its new node. Otherwise it
    stays on its old node.

    :param discard: whether to drop all old tables now, even if their time is not over yet.
    :param kill: whether to end the database sessions of the process that has begun the move. Use
        this if that process hangs and its sessions still hold locks.
    :raises OperationHeld: a process moves shards of the group at this time.
    """
    with journal.hold_run(KIND, group, {"to": "repair", "shards": []}) as run:
        work = _Work(run, ShardMoveOptions(), Stopping(), tell)
        work.begin(repairs=True, discard=discard, kill=kill)
        work.finish()
    return work.report


class _Work:
    """Moves shards of one group in this process, which holds the group's run in the journal."""

    def __init__(
        self, run: journal.JournalRun, options: ShardMoveOptions, stopping: Stopping, tell: Tell
    ) -> None:
        self._run = run
        self._options = options
        self._stopping = stopping
        self._tell = tell
        self.report = ShardMoveReport(run.subject, run.id)

    def begin(self, *, repairs: bool = False, discard: bool = False, kill: bool = False) -> None:
        """End the move that an earlier process has left unfinished, and drop expired old tables.

        :param repairs: whether the caller only ends a move, and begins none. If so, an interrupted
            operation of another kind, such as a migration, is no reason to refuse.
        :param discard, kill: as in :func:`repair`.
        """
        refuse_conflicts(self._run, only_held=repairs)
        runtime.refresh()
        record = ShardMoveRecord.unfinished(self._run)
        if record is not None:
            self._tell(f"ends the move of {record.change}, which was broken off: {record.phase}")
            if kill:
                self._end_sessions(record)
            self._end(record, look_after=LATE_SCHEMA)
        self.report.notes += remove_expired(self._run, at_once=discard)

    def _end_sessions(self, record: ShardMoveRecord) -> None:
        """End the database sessions of the process that has left the move unfinished.

        That process may hang. It has lost the run to this process, so it must not write any more.
        """
        with self._sessions(record) as both:
            for sessions in both:
                try:
                    ended = sessions.capture.end_sessions(record.number)
                except Error as exc:
                    # Only report the error, because it may be harmless: the new node may not have
                    # the shard's schema yet.
                    self._tell(
                        f"no session on {sessions.shard.node} was ended: {journal.one_line(exc)}"
                    )
                    continue
                if ended:
                    self._tell(f"{ended} sessions on {sessions.shard.node} were ended")

    def move(self, plan: ShardMovePlan) -> None:
        self.report.already = list(plan.already)
        for move in plan.shards:
            if self._stopping():
                break
            self._move_one(move)
            if self._run.arguments.get("current") is not None:
                # The move above could not be completed or undone. A later command needs its record
                # in the journal. The next move would overwrite this record, so do not begin it.
                break
        self.report.stopped = self._stopping.cause

    def finish(self) -> None:
        """Finish the run in the journal, unless a move could be neither completed nor undone."""
        if self.report.moved:
            self._wait_for_followers()
        if self._run.arguments.get("current") is not None:
            return  # Leave the run unfinished, so that the next command ends the move.
        failures = self.report.failures
        if failures:
            self._run.finish("failed", f"{len(failures)} shards were not moved")
        else:
            self._run.finish("stopped" if self._stopping() else "done")

    def _move_one(self, move: ShardToMove) -> None:
        self._tell(f"{move}: copies it from {move.source} to {move.target}")
        record = ShardMoveRecord.begin(self._run, move)
        try:
            with self._sessions(record) as (source, target):
                mover = self._mover(record, source, target)
                mover.run()
        except LeaseLost:
            raise
        except BaseException as exc:
            self._end_after(record, exc)
            if not isinstance(exc, Exception):
                raise
        else:
            self._record_moved(move, mover)

    def _end_after(self, record: ShardMoveRecord, cause: BaseException) -> None:
        """End a move that has failed with ``cause``, and add the failure to the report."""
        move = record.change
        why = str(cause) if isinstance(cause, MoveFailed) else f"{with_notes(cause)}."
        if not isinstance(cause, OperationStopped):
            self.report.failures[move.number] = why
        try:
            self._end(record)
        except LeaseLost:
            raise
        except Exception as exc:
            self.report.failures[move.number] = (
                f"{why} The move was not ended either ({with_notes(exc)}), and the shard may be"
                f" out of use until it is: run 'manage.py shards move {move.group} --repair' when the"
                " cause is mended. Nothing is lost."
            )

    def _end(self, record: ShardMoveRecord, look_after: timedelta | None = None) -> None:
        """Complete the move if its new topology is published, otherwise undo it.

        :param look_after: the time after which a later run looks for tables that an undone move
            has left on the target. None if the move can leave none.
        """
        move = record.change
        if record.phase == PUBLISHING and not record.rule_out():
            with self._sessions(record) as (source, target):
                mover = self._mover(record, source, target)
                mover.settle()
            self._record_moved(move, mover)
            return
        runtime.refresh()
        # Undo the move on the node that the topology names now. It is not the source of the move if
        # the source's replica has been promoted since the move began. If the move has renamed the
        # tables on the source, replication has renamed them on this node, too.
        node = runtime.shard(move.group, move.number).node
        with self._sessions(record, source=node) as (source, target):
            left = self._mover(record, source, target).undo()
        record.end(look_after=timedelta(0) if left else look_after)
        if left:
            self.report.notes.append(
                f"the copy of shard {move.number} on {move.target!r} was not deleted ({left});"
                " --repair tries again"
            )
        self._tell(f"{move}: it is on {node} as before")

    def _record_moved(self, move: ShardToMove, mover: ShardMover) -> None:
        self.report.failures.pop(move.number, None)
        self.report.moved[move.number] = move.target
        self.report.rows += mover.rows
        self.report.copying += mover.copying
        self.report.comparing += mover.comparing
        if mover.pause:
            self.report.pauses.append(mover.pause)
        self._tell(
            f"{move}: is on {move.target}; {mover.rows:,} rows, copied in {mover.copying:.1f} s and"
            f" compared in {mover.comparing:.1f} s; statements waited for {mover.pause * 1000:.0f} ms"
        )

    @contextmanager
    def _sessions(
        self, record: ShardMoveRecord, source: str | None = None
    ) -> Iterator[tuple[SchemaSessions, SchemaSessions]]:
        move = record.change
        with (
            SchemaSessions(move.on(source or move.source), record.confirm) as at_source,
            SchemaSessions(move.on(move.target), record.confirm) as at_target,
        ):
            yield at_source, at_target

    def _mover(
        self, record: ShardMoveRecord, source: SchemaSessions, target: SchemaSessions
    ) -> ShardMover:
        kind = ReplicatedShardMover if record.change.by_replication else ShardMover
        return kind(record, self._options, source, target, self._stopping, self._run.check)

    def _wait_for_followers(self) -> None:
        """Wait for some seconds until every process uses the new topology.

        A note in the report names the processes that still use the old one. They do no harm: the
        old tables are renamed, so their next statement finds no table. Then they read the new
        topology.
        """
        if note := note_on_followers("look it up at their next statement on a moved shard"):
            self.report.notes.append(note)
