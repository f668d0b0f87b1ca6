"""The move of one shard from its node, the source, to another node, the target.

The mover copies the rows while the site uses the shard. Triggers record each row that the site
changes, and the mover copies this row again. When few changes are left, the mover *hides* the old
tables: it renames them, so that no statement of the site finds them. It copies the last changes and
publishes the new topology. Then it gives the new tables, which were hidden until now, their real
names. docs/decisions/0035-moves-of-shards.md explains the order of these steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from django.db import Error, IntegrityError, OperationalError

from sharded_orm import runtime
from sharded_orm.backends.change_capture import CapturedTable, Change
from sharded_orm.backends.row_access import Row
from sharded_orm.backends.schema_move import FENCE, as_hidden
from sharded_orm.exceptions import MoveFailed
from sharded_orm.operations.error_notes import with_notes
from sharded_orm.operations.exceptions import OperationStopped
from sharded_orm.operations.nodes import node_connection
from sharded_orm.operations.runs.journal import one_line
from sharded_orm.operations.runs.rollout import Stopping
from sharded_orm.operations.shard_moves.record import (
    HIDING,
    PUBLISHING,
    ShardMoveRecord,
)
from sharded_orm.operations.shard_moves.request import ShardMoveOptions
from sharded_orm.operations.shard_moves.shard_sessions import SchemaSessions
from sharded_orm.operations.shard_moves.table_comparison import TableComparison
from sharded_orm.two_phase.recovery import refuse_prepared

#: The number of rows that are copied at once.
BATCH: Final = 2000
#: The number of recorded changes that are read at once. The changed rows are copied again.
CHANGES: Final = 1000
#: The number of recorded changes that are read at once after the tables are hidden. It is larger
#: than any number of changes, so that all are read by one query.
ALL_CHANGES: Final = 10**9
#: The tables are hidden as soon as at most this number of changed rows is left to copy.
FEW_CHANGES: Final = 50
#: In each round, the mover copies the rows that were changed during the round before. It gives up
#: if the number of changes has not become smaller for this number of rounds, because the site then
#: changes rows faster than the mover copies them.
MOST_ROUNDS: Final = 20
#: The largest number of attempts to copy a row, or to compare a row that differs. For example, the
#: new node refuses a row if its unique value belongs to an outdated copy of another row. When the
#: other row is copied again, the next attempt succeeds.
ATTEMPTS: Final = 10
#: The largest number of seconds that creating or dropping triggers may take.
TRIGGER_PATIENCE: Final = 30.0
#: The largest number of seconds that one attempt to hide the tables may take. An attempt waits for
#: open transactions, and statements of the site wait for the attempt. After a failed attempt, the
#: mover copies changes again before the next one.
HIDE_PATIENCE: Final = 0.5


class ShardMover:
    """Moves one shard. Used by one thread.

    :param check: called before each step. It raises an error if this process must not continue.
    """

    def __init__(
        self,
        record: ShardMoveRecord,
        options: ShardMoveOptions,
        source: SchemaSessions,
        target: SchemaSessions,
        stopping: Stopping,
        check: Callable[[], None],
    ) -> None:
        self._record = record
        self._move = record.change
        self._options = options
        self._source = source
        self._target = target
        self._stopping = stopping
        self._check = check
        self._tag = f"{record.number:x}"
        self._tables: dict[str, CapturedTable] = {}
        #: Maps the real name of each table to an object with the name that the table has on the
        #: source now. A hidden table has a different name. ``_there`` does the same for the target.
        self._here: dict[str, CapturedTable] = {}
        self._there: dict[str, CapturedTable] = {}
        #: Maps the name of each table to the primary keys of rows that the new node has refused.
        #: They must be copied again.
        self._refused: dict[str, dict[Row, None]] = {}
        self._refusal_error = ""
        self._comparison: TableComparison
        self._silent: list[str] = []
        # Values that identify the tables on the source and their columns. They are read at the
        # beginning of the move, and again at the switch. If the two results differ, somebody has
        # sent ALTER TABLE or TRUNCATE, which no trigger records, and the move fails.
        self._identities: frozenset[str] = frozenset()
        self._layout: Mapping[str, tuple[str, ...]] = {}
        self._triggers: set[str] = set()
        #: The number of copied rows, and how many seconds the copying and the comparison took.
        self.rows, self.copying, self.comparing = 0, 0.0, 0.0
        #: The number of seconds for which statements on the shard waited during the switch.
        self.pause = 0.0

    def run(self) -> None:
        """Move the shard. When this method returns, the shard is on the target.

        :raises OperationStopped: the work was asked to stop.
        :raises MoveFailed: the copy differs, the rows change faster than they are copied, or a
            transaction has used the shard for too long. The tables of the source may still be
            hidden then, so the caller must end the move.
        """
        began = time.monotonic()
        self._prepare()
        self._copy()
        self._catch_up()
        self.copying = time.monotonic() - began
        began = time.monotonic()
        self._comparison.compare_all(self._tables, self._proceed)
        self.comparing = time.monotonic() - began
        self._target.rows.report_counts()
        self._target.schema.warm_up()
        self._compare_open()
        self._switch()
        self.settle()

    # ##### Before the switch #####

    def _prepare(self) -> None:
        schema = self._source.schema
        # Read the identities of the tables before anything else. If somebody alters a table after
        # this line, its identity differs at the switch, and the move fails.
        self._identities = schema.identities()
        tables = schema.tables()
        self._tables = {table.name: table for table in tables}
        self._here = dict(self._tables)
        self._there = {table.name: as_hidden(table, self._tag) for table in tables}
        self._refused = {table.name: {} for table in tables}
        capture = self._source.capture
        with capture.exclusively(TRIGGER_PATIENCE):
            # Another process may undo this move, and must not miss a trigger. It first takes over
            # the run, then waits for the lock of this block, and then removes the triggers. If it
            # has taken over the run by now, confirm() raises an error, and no trigger is created.
            # If it takes over the run later, it finds the triggers that this block has created.
            self._record.confirm()
            capture.prepare()
            capture.watch(self._record.number, FENCE)
            capture.install(tables, TRIGGER_PATIENCE)
        self._silent = list(self._tables)
        if schema.triggers_see_all:
            self._silent = capture.tables_with_silent_changes(tables)
        self._triggers = capture.triggers()
        definition = schema.definition()
        self._layout = schema.layout()
        self._record.confirm()
        self._target.wrapper.create_shard_database()
        self._target.schema.build(definition, self._tag)
        self._target.rows.claim(self._record.number)
        if self._target.schema.layout() != self._layout:
            raise MoveFailed(
                f"{self._move} was not moved: {self._move.target!r} makes its tables otherwise than"
                f" {self._move.source!r} has them. Compare SHOW CREATE TABLE on both servers."
            )
        self._comparison = TableComparison(
            self._source.rows, self._target.rows, self._here, self._there
        )

    def _copy(self) -> None:
        for name, table in self._tables.items():
            last: Row = ()
            while True:
                self._proceed()
                began = time.monotonic()
                rows = self._source.rows.read(table, None, BATCH, last)
                if rows:
                    self._store(name, rows)
                    last = self._source.rows.pk_of(table, rows[-1])
                    self.rows += len(rows)
                if len(rows) < BATCH:
                    break
                if self._options.rate is not None:
                    left = len(rows) / self._options.rate - (time.monotonic() - began)
                    self._stopping.wait(left)

    def _store(self, name: str, rows: list[Row]) -> None:
        try:
            self._target.rows.store(self._there[name], rows)
        except IntegrityError as exc:
            self._refusal_error = one_line(exc)
            # The new node has refused a row because of a unique constraint. For example, two rows
            # have exchanged their unique values after one of them was copied. It is not known which
            # row was refused, so remember all of them, to copy them again.
            pks = [self._source.rows.pk_of(self._tables[name], row) for row in rows]
            self._refused[name].update(dict.fromkeys(pks))

    def _follow(self) -> int:
        """Copy again the rows that the triggers have recorded as changed.

        :return: roughly, the number of rows by which the copy is behind: the number of changes
            that were read, plus the number of rows that must be copied again because the new node
            refused them.
        """
        changes = self._source.capture.changes(self._record.number, CHANGES)
        refused = self._apply(changes)
        self._source.capture.forget(changes)
        return len(changes) + refused

    def _apply(self, changes: Sequence[Change]) -> int:
        """Copy changed rows to the new node, and once more the rows that it has refused before.

        Return how many rows must be copied again. If the new node refuses a row, these are all rows
        of the same table, because it is not known which row was refused.
        """
        pks = {name: dict(refused) for name, refused in self._refused.items()}
        for change in changes:
            pks[change.table][change.pk] = None
        refused = 0
        for name, changed in pks.items():
            if changed and not self._copy_again(name, changed):
                refused += len(changed)
        return refused

    def _copy_again(self, name: str, pks: Iterable[Row]) -> bool:
        """Copy some rows of table ``name`` again. Return False if the new node refuses one of them."""
        pks = list(pks)
        rows = self._source.rows.read_again(self._here[name], None, pks)
        self._comparison.note_changed(name, pks)
        try:
            self._target.rows.store(self._there[name], rows, pks)
        except IntegrityError as exc:
            self._refusal_error = one_line(exc)
            self._refused[name].update(dict.fromkeys(pks))
            return False
        self._refused[name] = {}
        return True

    def _catch_up(self) -> None:
        """Copy changed rows again and again, until few are left.

        The few rows are copied at the switch, while statements of the site wait.
        """
        least, rounds = None, 0
        while True:
            self._proceed()
            left = self._follow()
            if left <= FEW_CHANGES and not self._refusal:
                return
            if least is None or left < least:
                least, rounds = left, 0
            rounds += 1
            if rounds > MOST_ROUNDS:
                raise MoveFailed(
                    f"{self._move} was not moved: {self._refusal}"
                    if self._refusal
                    else f"{self._move} was not moved: its rows change faster than they are copied. Try"
                    " again at a quieter time, or without --rate."
                )

    def _follow_to_the_end(self) -> None:
        """Copy all changed rows that are left, after the tables on the source were hidden."""
        # Read the recorded changes only once: nobody can write to the hidden tables, so no other
        # change is recorded.
        changes = self._source.capture.changes(self._record.number, ALL_CHANGES)
        for _ in range(ATTEMPTS):
            self._check()
            if not self._apply(changes):
                return
            changes = []
        raise MoveFailed(f"{self._move} was not moved: {self._refusal}")

    @property
    def _refusal(self) -> str:
        """Why the new node refuses rows that must still be copied; "" if there are no such rows."""
        tables = [name for name, pks in self._refused.items() if pks]
        return (
            f"{self._move.target!r} refuses rows of {', '.join(tables)} ({self._refusal_error})"
            if tables
            else ""
        )

    def _compare_open(self) -> None:
        for _ in range(ATTEMPTS):
            self._catch_up()
            if self._comparison.compare_open() <= FEW_CHANGES:
                return
        self._raise_if_different(f"after {ATTEMPTS} comparisons")

    def _raise_if_different(self, when: str) -> None:
        if problems := self._comparison.problems():
            raise MoveFailed(
                f"{self._move} was not moved: {when}, the copy differs from the source."
                f" {'. '.join(problems)}."
            )

    # ##### The switch #####

    def _switch(self) -> None:
        deadline = time.monotonic() + self._options.patience
        while True:
            self._catch_up()
            self._comparison.compare_open()
            self._record.prepare()
            self._refuse_prepared()
            self._record.enter(HIDING)
            try:
                self._record.hidden_at = self._hide()
                break
            except OperationalError as exc:
                if time.monotonic() > deadline:
                    raise MoveFailed(
                        f"{self._move} was not moved: for {self._options.patience:g} s, there was"
                        f" always a transaction that used it ({exc}). End it, or allow more with"
                        " --patience."
                    ) from exc
            self._stopping.wait(HIDE_PATIENCE)
        self._refuse_prepared()
        self._copy_the_rest()
        self._record.enter(PUBLISHING)
        self._record.publish()
        self._show()
        runtime.refresh()

    def _refuse_prepared(self) -> None:
        # Refuse the switch if a two-phase transaction is prepared on the shard, because the target
        # would lack its rows. On MariaDB, there is a second reason. If the session of the
        # transaction has ended, RENAME TABLE gets the locks of the tables, and only then waits for
        # the end of the transaction. HIDE_PATIENCE does not limit this wait, and all other
        # statements wait for RENAME TABLE.
        group = self._move.group
        refuse_prepared(runtime.group(group), [self._move.on(self._move.source)])

    def _hide(self) -> float:
        tables = list(self._tables.values())
        began = self._source.schema.hide(tables, self._tag, HIDE_PATIENCE)
        self._here.update(self._there)
        return began

    def _copy_the_rest(self) -> None:
        """Copy the last changed rows, and check that the rows on both nodes are equal."""
        for _ in range(ATTEMPTS):
            self._follow_to_the_end()
            self._comparison.compare_all(self._silent, self._check)
            self._comparison.compare_open()
            silent = {n: pks for n, pks in self._comparison.open_pks.items() if n in self._silent}
            for name, pks in silent.items():
                self._copy_again(name, pks)
            if not silent:
                break
        self._comparison.compare_open()
        self._raise_if_different("at the switch")
        source = self._source
        if (
            source.schema.identities() != self._identities
            or source.schema.layout() != self._layout
            or source.capture.triggers() != self._triggers
        ):
            raise MoveFailed(
                f"{self._move} was not moved: somebody has altered, truncated or dropped a table"
                " meanwhile, for which databases call no trigger. Run the command again."
            )
        self._target.schema.set_counters(self._source.schema.counters())

    def _show(self) -> None:
        self._target.schema.show(TRIGGER_PATIENCE)
        if self._record.hidden_at is not None:
            self.pause = time.monotonic() - self._record.hidden_at
            self._record.hidden_at = None

    # ##### After the switch #####

    def settle(self) -> None:
        """Complete a move whose new topology is published. Can be repeated.

        The tables on the target get their real names, the journal records that the move is
        complete, and the triggers are removed from the old tables.
        """
        self._show()
        self._target.schema.finish()
        self._record.keep_until(self._options.keep)
        with suppress(Error):  # If this fails, the triggers are dropped later, with the old tables.
            remove_capture(self._source, self._record.number)

    def undo(self) -> str:
        """Undo a move: give the source's tables their names back, and remove the copy on the
        target.

        Call this only if it is certain that the new topology will never be published. Otherwise the
        site would look for the shard on the target, where it has no tables then. Can be repeated.

        :return: why the copy could not be removed; "" if it was removed. A remaining copy does no
            harm.
        """
        # Wait until no other mover holds this lock. Another mover may have been paused in a block
        # with this lock, and would create triggers when it continues. If it enters such a block
        # later, it notices that this process has taken over the run, and stops.
        with self._source.capture.exclusively(TRIGGER_PATIENCE):
            pass
        self._source.schema.show(TRIGGER_PATIENCE)
        remove_capture(self._source, self._record.number)
        try:
            remove_copy(self._target)
        except Error as exc:
            return with_notes(exc)
        return ""

    def _proceed(self) -> None:
        if self._stopping():
            raise OperationStopped(f"The work was stopped: {self._stopping.cause}.")
        self._check()


def remove_capture(sessions: SchemaSessions, number: int) -> None:
    """Remove what a move has installed on the source: the triggers that record changes, the table
    of these changes, and the fence.

    Can be repeated.

    :raises django.db.OperationalError: a transaction has used a table for too long.
    """
    sessions.capture.unwatch(number)
    sessions.capture.uninstall(TRIGGER_PATIENCE)


def remove_copy(sessions: SchemaSessions) -> None:
    """Drop the hidden tables of a shard on the node of ``sessions``. Can be repeated.

    The shard's schema is dropped, too, if it has no other tables.
    """
    shard = sessions.shard
    with node_connection(shard.node) as node:
        if shard.schema not in node.schemas_present():
            return
    sessions.schema.discard()
    sessions.close()
