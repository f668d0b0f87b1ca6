"""The move of one shard: copy, follow the changes, hide the old tables, publish, show the new ones.

docs/decisions/0035-moves-of-shards.md tells why each step is where it is.
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
from sharded_orm.exceptions import MoveFailed, OperationStopped
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

#: Rows are copied in batches of this many.
BATCH: Final = 2000
#: Changes that are applied at once.
CHANGES: Final = 1000
#: More changes than a journal ever has.
ALL_CHANGES: Final = 10**9
#: The tables are hidden once the journal has at most this many changes.
FEW_CHANGES: Final = 50
#: After this many rounds without progress, the source changes faster than the mover copies.
MOST_ROUNDS: Final = 20
#: How often the mover tries to copy rows that the target refuses, because other rows there still
#: have their unique values.
ATTEMPTS: Final = 10
#: Seconds that creating or dropping triggers may take.
TRIGGER_PATIENCE: Final = 30.0
#: Seconds for which the tables are tried to be hidden, before the journal is followed again.
HIDE_PATIENCE: Final = 0.5


class ShardMover:
    """Moves one shard. Used by one thread.

    :param check: called before each step. Raises an error if this process must not go on.
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
        self._move = record.move
        self._options = options
        self._source = source
        self._target = target
        self._stopping = stopping
        self._check = check
        self._tag = f"{record.number:x}"
        self._tables: dict[str, CapturedTable] = {}
        #: The source's tables, keyed by real name. Once a table is hidden, its value has the hidden
        #: name.
        self._here: dict[str, CapturedTable] = {}
        self._there: dict[str, CapturedTable] = {}
        #: Rows that must be copied again, by table, since the target has refused them.
        self._refused: dict[str, dict[Row, None]] = {}
        self._refusal_error = ""
        self._comparison: TableComparison
        self._silent: list[str] = []
        # These are compared at the switch, because no trigger reports ALTER TABLE or TRUNCATE.
        self._identities: frozenset[str] = frozenset()
        self._layout: Mapping[str, tuple[str, ...]] = {}
        self._triggers: set[str] = set()
        #: The number of rows that were copied, and the seconds of copying and of comparing them.
        self.rows, self.copying, self.comparing = 0, 0.0, 0.0
        #: The seconds for which statements waited.
        self.pause = 0.0

    def run(self) -> None:
        """Move the shard, so that the target has it on return.

        :raises OperationStopped: the work was asked to stop.
        :raises MoveFailed: the copy differs, the source changes faster than it is copied, or a
            transaction has used the shard for too long. The tables of the source may be hidden.
        """
        began = time.monotonic()
        self._prepare()
        self._copy()
        self._catch_up()
        self.copying = time.monotonic() - began
        began = time.monotonic()
        self._comparison.compare_all(self._tables, self._proceed)
        self.comparing = time.monotonic() - began
        self._target.schema.warm_up()
        self._compare_open()
        self._switch()
        self.settle()

    # ##### Before the switch #####

    def _prepare(self) -> None:
        schema = self._source.schema
        # Read the identities first. If a table is altered after this line, its identity will differ
        # at the switch.
        self._identities = schema.identities()
        tables = schema.tables()
        self._tables = {table.name: table for table in tables}
        self._here = dict(self._tables)
        self._there = {table.name: as_hidden(table, self._tag) for table in tables}
        self._refused = {table.name: {} for table in tables}
        capture = self._source.capture
        with capture.exclusively(TRIGGER_PATIENCE):
            # Another process may end this move. It takes over the run first, and then takes this
            # lock to remove the triggers. If it has the run by now, confirm() raises an error.
            # Otherwise it gets the lock after this block.
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
            # Rows are read at different moments. So these rows and others may have exchanged unique
            # values between two reads. Both are copied again.
            pks = [self._source.rows.pk_of(self._tables[name], row) for row in rows]
            self._refused[name].update(dict.fromkeys(pks))

    def _follow(self) -> int:
        """Copy rows that were changed since, as far as one read of the journal names them.

        :return: the number of changes read and of rows refused, which shows about how many are
            left.
        """
        changes = self._source.capture.changes(self._record.number, CHANGES)
        refused = self._apply(changes)
        self._source.capture.forget(changes)
        return len(changes) + refused

    def _apply(self, changes: Sequence[Change]) -> int:
        """Copy changed rows, and those that were refused before. Return how many are refused."""
        pks = {name: dict(refused) for name, refused in self._refused.items()}
        for change in changes:
            pks[change.table][change.pk] = None
        refused = 0
        for name, changed in pks.items():
            if changed and not self._copy_again(name, changed):
                refused += len(changed)
        return refused

    def _copy_again(self, name: str, pks: Iterable[Row]) -> bool:
        """Copy rows again. Return whether the target has accepted them."""
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
        """Follow the source until few changes are left."""
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
        """Follow the source, whose tables are hidden, until nothing is left."""
        # Nothing is added to the journal any more, so it is read once, and left as it is.
        changes = self._source.capture.changes(self._record.number, ALL_CHANGES)
        for _ in range(ATTEMPTS):
            self._check()
            if not self._apply(changes):
                return
            changes = []
        raise MoveFailed(f"{self._move} was not moved: {self._refusal}")

    @property
    def _refusal(self) -> str:
        """Why rows must be copied again; "" if there are none."""
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
        # On MariaDB, a prepared branch whose session has ended does not keep a RENAME TABLE from locking
        # its tables. RENAME TABLE waits for the branch then, and all others wait for RENAME TABLE. If
        # it did not wait, rows of the branch would be missing in the target.
        group = self._move.group
        refuse_prepared(runtime.group(group), [self._move.on(self._move.source)])

    def _hide(self) -> float:
        tables = list(self._tables.values())
        began = self._source.schema.hide(tables, self._tag, HIDE_PATIENCE)
        self._here.update(self._there)
        return began

    def _copy_the_rest(self) -> None:
        """Bring the target to the last state of the source, and make sure that it is."""
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
        """Show the new tables, and remove the triggers from the old ones. Can be repeated."""
        self._show()
        self._target.schema.finish()
        self._record.keep_until(self._options.keep)
        with suppress(Error):  # If this fails, the triggers are dropped later, with the old tables.
            remove_capture(self._source, self._record.number)

    def undo(self) -> str:
        """Undo a move: show the tables of the source, and remove the copy. Can be repeated.

        Call this only if it is certain that the move will never be published.

        :return: why the copy could not be removed; "" if it was removed. A copy that is left
            disturbs nobody.
        """
        # A paused mover that held this lock has left it after this block. One that takes it later
        # has lost the run, and stops.
        with self._source.capture.exclusively(TRIGGER_PATIENCE):
            pass
        self._source.schema.show(TRIGGER_PATIENCE)
        remove_capture(self._source, self._record.number)
        try:
            remove_copy(self._target)
        except Error as exc:
            return one_line(exc)
        return ""

    def _proceed(self) -> None:
        if self._stopping():
            raise OperationStopped(f"The work was stopped: {self._stopping.cause}.")
        self._check()


def remove_capture(sessions: SchemaSessions, number: int) -> None:
    """Remove the triggers, the journal and the fence of a move. Can be repeated.

    :raises django.db.OperationalError: a transaction has used a table for too long.
    """
    sessions.capture.unwatch(number)
    sessions.capture.uninstall(TRIGGER_PATIENCE)


def remove_copy(sessions: SchemaSessions) -> None:
    """Drop hidden tables, and the schema if nothing else is in it. Can be repeated."""
    shard = sessions.shard
    with node_connection(shard.node) as node:
        if shard.schema not in node.schemas_present():
            return
    sessions.schema.discard()
    sessions.close()
