"""The move of one shard key from its shard, the source, to another shard, the target.

- The mover copies the key's rows into *side tables* on the target. Queries of the site do not see
  side tables. If the site changes rows meanwhile, the mover copies these rows again.
- The *switch* moves the rows from the side tables into the tables of the models, which are called
  the real tables, and records that the target owns the key.
- Afterwards, the mover moves the old rows on the source into side tables there. They are kept for
  some time.

docs/decisions/0031-mover-of-keys.md explains the order of the steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence

from django.db import Error, IntegrityError, OperationalError

from sharded_orm import runtime
from sharded_orm.backends.change_capture import CapturedTable, Change, ChangeCapture
from sharded_orm.backends.fence_messages import is_deadlock
from sharded_orm.backends.row_copy import ChangedRows
from sharded_orm.exceptions import LeaseLost, MoveFailed
from sharded_orm.operations.exceptions import OperationStopped
from sharded_orm.operations.moves import record as records
from sharded_orm.operations.moves.record import MoveRecord
from sharded_orm.operations.moves.request import MoveOptions
from sharded_orm.operations.moves.shard_sessions import ShardSessions
from sharded_orm.operations.moves.verification import differences
from sharded_orm.operations.runs.journal import one_line
from sharded_orm.operations.runs.rollout import Stopping
from sharded_orm.two_phase.recovery import refuse_prepared

logger = logging.getLogger("sharded_orm.operations")

#: The number of rows that are read and written at once.
BATCH = 500
#: The journal, a table on the source, records each change of the key's rows until the mover has
#: copied the row again. If it has at most this many entries, the copy is current enough to go on.
FEW_CHANGES = 50
#: The mover gives up if the number of changes that are left to copy has not become smaller during
#: this many reads of the journal: the site then changes rows faster than the mover copies them.
MOST_ROUNDS = 100
#: The largest number of attempts to switch the key to the target before the move is given up.
ATTEMPTS = 10
#: A read of the journal of changes takes a limit, the largest number of entries to return. To read
#: all entries at once, pass this number, because a journal never has so many entries.
ALL_CHANGES = 10**9
#: The mover waits for two things before it creates triggers on a shard: for another process that
#: creates or drops triggers there, and then for open transactions. This is the largest number of
#: seconds for each of the two waits.
TRIGGER_PATIENCE = 30.0


class _TooLong(Exception):
    """Raised if an attempt to switch the key to the target would make writes wait for too long.

    The options of the move set the limit.
    """


class KeyMover:
    """Moves single keys of a group. To be used by one thread.

    :param tables: all tables of the group, in the order of
        :func:`~sharded_orm.operations.moves.tables.tables_of_group`.
    :param check: called before each step. It raises an error if this process must not continue,
        because another process has taken over.
    """

    def __init__(
        self,
        tables: Sequence[CapturedTable],
        options: MoveOptions,
        sessions: ShardSessions,
        stopping: Stopping,
        check: Callable[[], None],
    ) -> None:
        self._tables = tables
        self._by_name = {table.name: table for table in tables}
        self._options = options
        self._sessions = sessions
        self._stopping = stopping
        self._check = check
        #: About the last move: the number of rows that it moved, and the seconds for which writes
        #: to the key had to wait.
        self.rows, self.pause = 0, 0.0
        # The time at which writes to the moving key began to wait; None if they do not wait.
        self._closed_at: float | None = None

    # ##### Before the switch #####

    def prepare(self, move: MoveRecord) -> None:
        """Copy the key's rows to the target. If the site changes rows during the copy, copy these
        rows again.

        :raises OperationStopped: the work was asked to stop.
        :raises MoveFailed: the target has rows of the key already, the source changes faster than
            the mover copies, or another process has aborted the move.
        :raises BranchesPrepared: a transaction in two phases is prepared on one of the shards.
        """
        source, target = self._sessions.capture(move.source), self._sessions.capture(move.target)
        # Close the fence on the target at once, because the target must refuse writes of the key
        # until it owns the key. Leave the fence on the source open until the switch, because the
        # site goes on to write there.
        self._watch(target, move, closed=True)
        self._watch(source, move, closed=False)
        # Refuse the move if a transaction in two phases is prepared on one of the shards. It may
        # have written rows of the key before the triggers existed, and the journal would miss these
        # rows. CREATE TRIGGER usually waits for such a transaction; but on MariaDB it does not wait
        # if the session of the transaction has ended.
        shards = [runtime.shard(move.group, number) for number in (move.source, move.target)]
        refuse_prepared(runtime.group(move.group), shards)
        self._sessions.copy(move.source).prepare(self._tables)
        self._sessions.copy(move.target).prepare(self._tables)
        self._require_no_rows(move)
        move.enter(records.COPYING)
        for table in self._tables:
            self._copy(move, table, self._options.rate)
        self.catch_up(move)

    def _require_no_rows(self, move: MoveRecord) -> None:
        """Check that the target has no rows of the key before the copy begins.

        If the move is undone later, all rows of the key are deleted from the target. So rows that
        were there before would be lost.
        """
        copy = self._sessions.copy(move.target)
        for table in self._tables:
            count = copy.key_digests(table, move.value).count
            if count:
                raise MoveFailed(
                    f"The {move} was given up, and the key is where it was: the target has {count} rows"
                    f" of the key in {table.name!r} already. 'manage.py shards check' finds such rows;"
                    " move them away first."
                )

    def catch_up(self, move: MoveRecord, published: Sequence[CapturedTable] = ()) -> None:
        """Copy again the rows that the site has changed since they were copied, until few changes
        are left.

        If the number of changes that are left no longer becomes smaller, the move fails.

        :param published: tables whose copied rows were already moved from the side tables into the
            real tables of the target. Changed rows of these tables are written to the real tables.
        :raises OperationStopped: the work was asked to stop.
        :raises MoveFailed: for the same reasons as in :meth:`prepare`.
        """
        capture = self._sessions.capture(move.source)
        least, rounds = None, 0
        self._continue(move)
        while (backlog := capture.backlog(move.number)) > FEW_CHANGES:
            if least is None or backlog < least:
                least, rounds = backlog, 0
            elif rounds >= MOST_ROUNDS:
                raise MoveFailed(
                    f"The {move} was given up, and the key is where it was: {backlog} changes of its"
                    f" rows are still to be copied, because changes came as fast as they were copied."
                    " Try again when the key is written less."
                )
            while backlog > 0:
                self._continue(move)
                backlog -= self._follow(move, published) or backlog
                rounds += 1

    def _watch(self, capture: ChangeCapture, move: MoveRecord, *, closed: bool) -> None:
        with capture.exclusively(TRIGGER_PATIENCE):
            # Another process may abort this move. To do so, it records the abort, takes this lock,
            # and removes the fences. If the abort is recorded already, move.check() raises an
            # error, and no fence is made. Otherwise the other process gets the lock after this
            # block, and removes the fence that is made here.
            move.check()
            self._check()
            capture.prepare()
            capture.watch(move.number, move.value, closed=closed)
            capture.install(self._tables, TRIGGER_PATIENCE)

    def _copy(self, move: MoveRecord, table: CapturedTable, rate: int | None = None) -> None:
        source, target = self._sessions.copy(move.source), self._sessions.copy(move.target)
        last: tuple[object, ...] = ()
        while True:
            self._continue(move)
            began = time.monotonic()
            rows = source.read(table, move.value, BATCH, last)
            if rows:
                target.put(table, move.number, rows)
                last = source.pk_of(table, rows[-1])
            if len(rows) < BATCH:
                return
            if rate is not None:
                self._stopping.wait(len(rows) / rate - (time.monotonic() - began))

    def _follow(self, move: MoveRecord, published: Sequence[CapturedTable]) -> int:
        """Copy the rows that have changed since they were copied. Return the number of changes."""
        changes = self._sessions.capture(move.source).changes(move.number)
        if changes:
            target, there = self._sessions.copy(move.target), []
            for changed in self._read_again(move, changes):
                if changed.table in published:
                    there.append(changed)
                else:
                    target.remove(changed.table, move.number, changed.pks)
                    target.put(changed.table, move.number, changed.rows)
            if there:
                target.complete(move.number, there)
            self._sessions.capture(move.source).forget(changes)
        return len(changes)

    def _read_again(self, move: MoveRecord, changes: Sequence[Change]) -> list[ChangedRows]:
        """Read changed rows from the source again, as they are now."""
        source = self._sessions.copy(move.source)
        pks: dict[str, dict[tuple[object, ...], None]] = {}
        for change in changes:
            pks.setdefault(change.table, {})[change.pk] = None
        return [
            ChangedRows(table, list(changed), source.read_again(table, move.value, changed))
            for name, changed in pks.items()
            for table in [self._by_name[name]]
        ]

    # ##### The switch #####

    def switch(self, move: MoveRecord) -> None:
        """Make the target the owner of the key.

        Call this only when all processes have forgotten the old shard of the key.

        :raises MoveFailed: the copy differs from the source, the target refuses a row, or the
            switch would take longer than writes may wait. The source still owns the key, but
            triggers may still refuse writes to the key.
        :raises LeaseLost: this process has lost its lease, so another process may move keys now.
            Writes to the key are accepted.
        """
        self.rows, self.pause = 0, 0.0
        cascading = self._sessions.copy(move.source).cascading(self._tables)
        self._open_sessions(move)
        move.enter(records.SWITCHING)
        self.catch_up(move)
        published = self._publish_early(move, cascading)
        for attempt in range(ATTEMPTS):
            # Ignore two kinds of errors here: the target refuses a row, or there is a deadlock with
            # other writers. A row is refused, for example, if two rows have exchanged unique values
            # and only one of them was read after that. _switch_once() below reads the changed rows
            # again while writes wait. If the target still refuses a row then, the switch fails.
            try:
                self.catch_up(move, published)
                self._follow(move, published)
            except Error as exc:
                if not (isinstance(exc, IntegrityError) or is_deadlock(exc)):
                    raise
            self._closed_at = began = time.monotonic()
            try:
                self._switch_once(move, began + self._options.max_pause, published, cascading)
            except _TooLong:
                self._sessions.capture(move.source).reopen(move.number)
                self._stopping.wait(0.1 * (attempt + 1))
                continue
            except LeaseLost as exc:
                self._give_up(move, exc)
                raise
            self._end_pause()
            return
        raise MoveFailed(
            f"The {move} was given up, and the key is where it was: after {ATTEMPTS} attempts, its"
            f" writes would still have waited for more than {self._options.max_pause * 1000:.0f} ms."
            " A transaction on the key may be open for long. Try again, or allow a longer --max-pause."
        )

    def _open_sessions(self, move: MoveRecord) -> None:
        """Open all sessions, and read the columns of all tables.

        This is done before the switch, so that it takes no time while writes of the key wait.
        """
        for shard in (move.source, move.target):
            self._sessions.capture(shard)
            copy = self._sessions.copy(shard)
            for table in self._tables:
                copy.columns(table)

    def _publish_early(self, move: MoveRecord, cascading: Collection[str]) -> list[CapturedTable]:
        """Publish as many tables as possible before writes begin to wait, and return these tables.

        To publish a table is to move its copied rows from the side table on the target into the
        real table there. Nobody sees these rows yet, because the source owns the key, and queries
        of several shards leave them out.

        Three kinds of tables are published only while writes wait:

        - Tables without the shard key, because queries cannot leave out their rows.
        - Tables that cascades of the database change, because no trigger records such changes.
        - Tables with a unique index that does not contain the shard key. Suppose that the site
          deletes a published row on the source, and then inserts its unique value for another key
          on the target. The target would refuse this until the mover has deleted the copy, too.
        """
        target = self._sessions.copy(move.target)
        tables = [
            table
            for table in self._tables
            if not table.links
            and not table.fresh_ids
            and table.name not in cascading
            and target.may_publish_early(table)
        ]
        try:
            target.publish(tables, move.number)
        except Error as exc:
            if not (isinstance(exc, IntegrityError) or is_deadlock(exc)):
                raise
            # The target refuses a row, so publish nothing early. The reason may be harmless: the
            # rows were read at different moments, so two of them may seem to have the same unique
            # value. If a row of another key on the target really has the value, the switch fails.
            return []
        return tables

    def _give_up(self, move: MoveRecord, cause: LeaseLost) -> None:
        """Abort the move and reopen the fence, so that the source accepts writes of the key again.

        The mover calls this method if it has lost its lease (the right to move keys of the group)
        while writes waited. The method first aborts the move, so that no other process can make the
        target the owner any more. It then reopens the fence on the source, unless another process
        has removed this fence, or a later move has taken it over.
        """
        try:
            if move.abort(one_line(cause)):
                self._sessions.capture(move.source).reopen(move.number)
        except MoveFailed:
            pass  # Another process has taken over the run and ended the move. Nothing is left to do.
        except Error as exc:
            logger.warning("the %s was broken off, and its fence stays closed: %s", move, exc)

    def _switch_once(
        self,
        move: MoveRecord,
        deadline: float,
        published: Sequence[CapturedTable],
        cascading: Collection[str],
    ) -> None:
        source, target = self._sessions.capture(move.source), self._sessions.capture(move.target)
        copy = self._sessions.copy(move.target)
        try:
            source.close(move.number, max(deadline - time.monotonic(), 0.01))
        except MoveFailed:
            raise
        except OperationalError as exc:
            # The fence, which makes writes of the key wait, could not be closed in time: a
            # transaction on the key is open.
            raise _TooLong from exc
        changes = self._read_again(move, source.changes(move.number, ALL_CHANGES))
        for name in cascading:
            copy.discard([self._by_name[name]], move.number)
            self._copy(move, self._by_name[name])
        _require_time(deadline)
        late = [table for table in self._tables if table not in published]
        try:
            copy.complete(
                move.number,
                [changed for changed in changes if changed.table.name not in cascading],
                late,
            )
        except OperationalError as exc:
            if is_deadlock(exc):
                raise _TooLong from exc  # Nothing was changed.
            raise
        try:
            _require_time(deadline)
        except _TooLong:
            # There is no time left, so writes go on at the source. Remove the rows of the tables
            # ``late`` from the target's real tables: they may be there only while writes wait. The
            # next attempt publishes them again.
            copy.unpublish(late, move.number, move.value)
            raise
        self.rows, problems = differences(
            self._sessions.copy(move.source), copy, self._tables, move.value
        )
        if problems:
            raise MoveFailed(
                f"The {move} was given up, and the key is where it was: the copy differs from the"
                f" source. {'. '.join(problems)}."
            )
        self._check()
        move.switch()
        target.admit(move.number)

    def _end_pause(self) -> None:
        if self._closed_at is not None:
            self.pause = time.monotonic() - self._closed_at
            self._closed_at = None

    # ##### After the switch #####

    def settle(self, move: MoveRecord) -> None:
        """Let the target accept writes of the key, and move the old rows of the source to side
        tables.

        Call this after the switch, which has made the target the owner of the key. Can be repeated.
        The triggers on both shards stay, because other moves may need them.
        :func:`~sharded_orm.operations.moves.leftovers.remove_leftovers` drops them when no move
        needs them any more.
        """
        source, target = self._sessions.capture(move.source), self._sessions.capture(move.target)
        target.unwatch(move.number)
        # Usually the pause of writes has ended already. If an error came just after the commit of
        # the switch, writes have waited until now.
        self._end_pause()
        sessions = source.sessions()
        self._sessions.copy(move.source).prepare(self._tables)
        self._sessions.copy(move.source).set_aside(self._tables, move.number, move.value)
        # Discard the side tables on the target before the move is recorded as settled. In the other
        # order, a kill between the two steps would leave side tables that only 'keys repair' finds.
        self._sessions.copy(move.target).discard_everywhere(move.number)
        move.settle(sessions)

    def undo(self, move: MoveRecord, why: str) -> bool:
        """Abort a move and remove its copies and fences, unless the target owns the key already.

        A fence is the set of triggers that refuse writes of the key. Can be repeated.

        :param why: the cause, for the record of the move.
        :return: True if the move is undone. False if the target owns the key already; then nothing
            was removed.
        """
        if not move.abort(why):
            return False
        self._sessions.close()
        source, target = self._sessions.capture(move.source), self._sessions.capture(move.target)
        # Remove the fence of the source first, because the source owns the key and must accept
        # writes soon. The process that has begun the move is perhaps only paused, and could make a
        # fence when it goes on. exclusively() takes the lock that a process needs to make a fence.
        # So the paused process has made its fence before, or gets the lock later and notices the
        # abort.
        for capture in (source, target):
            with capture.exclusively(TRIGGER_PATIENCE):
                capture.prepare()
            if capture is source:
                source.unwatch(move.number)
        copy = self._sessions.copy(move.target)
        published = self._tables if move.may_be_published else ()
        # A paused mover may have an open transaction that publishes rows. withdraw() waits for its
        # end, and then removes the move's fence and the published rows. If the paused mover goes on
        # and tries to publish again, it finds no fence and publishes nothing.
        copy.withdraw(published, move.number, move.value, move.former_fence())
        copy.discard_everywhere(move.number)
        move.finish_abort()
        return True

    def _continue(self, move: MoveRecord) -> None:
        if self._stopping():
            raise OperationStopped(f"The work was stopped: {self._stopping.cause}.")
        self._check()
        move.check()


def _require_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise _TooLong
