"""The move of one shard from its node, the source, to another node, the target.

The mover copies the rows, and copies a row again if the site changes it meanwhile. Then it hides
the old tables by renaming them, publishes the new topology, and gives the new tables their real
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
#: The largest number of rows that are copied again in one batch, because they have changed on the
#: old node.
CHANGES: Final = 1000
#: The limit that is passed to read all changes at once. A journal of changes never has so many
#: entries.
ALL_CHANGES: Final = 10**9
#: The tables are hidden (renamed) once the journal, the table of changed rows on the old node, has at
#: most this many entries.
FEW_CHANGES: Final = 50
#: The mover gives up after this many rounds in which the number of changes has not become smaller.
#: The source then changes faster than the mover copies.
MOST_ROUNDS: Final = 20
#: The largest number of attempts to copy rows that the new node refuses, because older rows there
#: still have the unique values of these rows.
ATTEMPTS: Final = 10
#: The largest number of seconds that creating or dropping triggers may take.
TRIGGER_PATIENCE: Final = 30.0
#: The largest number of seconds that one attempt to hide (rename) the tables may take. If an
#: attempt takes longer, the mover copies changes again before the next attempt.
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
        #: The tables on the source (the old node), keyed by their real names. While a table is hidden
        #: (renamed), its object in this dict has the new name.
        self._here: dict[str, CapturedTable] = {}
        self._there: dict[str, CapturedTable] = {}
        #: The primary keys of rows that must be copied again, because the new node has refused them;
        #: keyed by table.
        self._refused: dict[str, dict[Row, None]] = {}
        self._refusal_error = ""
        self._comparison: TableComparison
        self._silent: list[str] = []
        # The state of the tables on the old node at the beginning of the move. It is compared at the
        # switch to the new node, because no trigger records ALTER TABLE or TRUNCATE.
        self._identities: frozenset[str] = frozenset()
        self._layout: Mapping[str, tuple[str, ...]] = {}
        self._triggers: set[str] = set()
        #: The number of rows that were copied, and the numbers of seconds that copying and
        #: comparing took.
        self.rows, self.copying, self.comparing = 0, 0.0, 0.0
        #: The number of seconds for which statements on the shard waited during the switch.
        self.pause = 0.0

    def run(self) -> None:
        """Move the shard. When this method returns, the shard is on the target.

        :raises OperationStopped: the work was asked to stop.
        :raises MoveFailed: the copy differs, the source changes faster than it is copied, or a
            transaction has used the shard for too long. The tables of the source may then still be
            hidden (renamed, so that no statement finds them).
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
        # Read the identities of the tables first. If a table is altered after this line, the mover
        # notices it, because the table's identity differs at the switch.
        self._identities = schema.identities()
        tables = schema.tables()
        self._tables = {table.name: table for table in tables}
        self._here = dict(self._tables)
        self._there = {table.name: as_hidden(table, self._tag) for table in tables}
        self._refused = {table.name: {} for table in tables}
        capture = self._source.capture
        with capture.exclusively(TRIGGER_PATIENCE):
            # Leave no triggers behind if another process ends this move. It takes over the run, and
            # then takes this lock to remove the triggers. If it has taken over the run by now,
            # confirm() raises an error. Otherwise, it gets the lock after this block, and removes
            # the triggers.
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
            # The new node has refused rows because of a unique constraint. Rows are read at different
            # moments, so two rows may have exchanged unique values in between. Remember all these
            # rows, to copy them again.
            pks = [self._source.rows.pk_of(self._tables[name], row) for row in rows]
            self._refused[name].update(dict.fromkeys(pks))

    def _follow(self) -> int:
        """Read the journal of changes once, and copy again the rows that it names.

        :return: the number of changes that were read, plus the number of rows that the new node
            refused. It shows roughly how many rows are left.
        """
        changes = self._source.capture.changes(self._record.number, CHANGES)
        refused = self._apply(changes)
        self._source.capture.forget(changes)
        return len(changes) + refused

    def _apply(self, changes: Sequence[Change]) -> int:
        """Copy the changed rows to the new node, and also the rows that it refused in earlier
        calls.

        Return the number of rows that the new node refused in this call.
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
        """Copy the rows with the primary keys ``pks`` again. Return False if the new node refuses a
        row.
        """
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
        """Copy changes of the old node until so few are left that the switch can copy the rest."""
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
        """Copy all remaining changes of the old node, whose tables are hidden (renamed) by now."""
        # Read the journal of changes only once, and do not delete its entries. It gets no more
        # entries, because writes no longer reach the renamed tables.
        changes = self._source.capture.changes(self._record.number, ALL_CHANGES)
        for _ in range(ATTEMPTS):
            self._check()
            if not self._apply(changes):
                return
            changes = []
        raise MoveFailed(f"{self._move} was not moved: {self._refusal}")

    @property
    def _refusal(self) -> str:
        """Return why the new node has refused rows, which must be copied again; "" without such rows."""
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
        # Refuse the switch if a two-phase transaction is prepared on the shard. On MariaDB, after
        # the session of such a transaction has ended, a RENAME TABLE still gets the locks of its
        # tables. Then the RENAME TABLE waits for the end of the transaction, and all other
        # statements wait for the RENAME TABLE. Even without this wait, the target would lack the
        # rows of the transaction.
        group = self._move.group
        refuse_prepared(runtime.group(group), [self._move.on(self._move.source)])

    def _hide(self) -> float:
        tables = list(self._tables.values())
        began = self._source.schema.hide(tables, self._tag, HIDE_PATIENCE)
        self._here.update(self._there)
        return began

    def _copy_the_rest(self) -> None:
        """Copy the last changes to the new node, and check that its rows equal those of the old node."""
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
        """Rename the copied tables to their real names, and record that the move is complete.

        Also remove the triggers from the old tables. Can be repeated.
        """
        self._show()
        self._target.schema.finish()
        self._record.keep_until(self._options.keep)
        with suppress(Error):  # If this fails, the triggers are dropped later, with the old tables.
            remove_capture(self._source, self._record.number)

    def undo(self) -> str:
        """Undo a move: give the source's tables their names back, and remove the copy on the target.

        Call this only if it is certain that the move will never be published. Can be repeated.

        :return: why the copy could not be removed; "" if it was removed. A remaining copy does no
            harm.
        """
        # Wait for a mover that was paused while it held the lock. A mover that takes the lock later
        # notices that this process has taken over the run, and stops.
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
    """Remove the triggers of a move, its journal of changes, and its fence. Can be repeated.

    :raises django.db.OperationalError: a transaction has used a table for too long.
    """
    sessions.capture.unwatch(number)
    sessions.capture.uninstall(TRIGGER_PATIENCE)


def remove_copy(sessions: SchemaSessions) -> None:
    """On the node of ``sessions``, drop the shard's hidden (renamed) tables. Also drop its schema
    if the schema has nothing else.

    Can be repeated.
    """
    shard = sessions.shard
    with node_connection(shard.node) as node:
        if shard.schema not in node.schemas_present():
            return
    sessions.schema.discard()
    sessions.close()
