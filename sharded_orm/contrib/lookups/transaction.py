"""The lookups' part of one transaction on a shard: which entries follow a commit, which a rollback.

Each statement that writes rows is one :class:`EntryChange`. Its tokens name the entries that it has
written, in three sets: new ones, existing ones that it has taken over, and those of values that no
row will have any more.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, product
from typing import Any
from uuid import uuid4

from sharded_orm.backends.write_hooks.statement_changes import StatementChange, StatementWatcher
from sharded_orm.contrib.lookups import entries
from sharded_orm.contrib.lookups.entries import EntryTable, Place
from sharded_orm.contrib.lookups.exceptions import LookupExpired, LookupRefused

logger = logging.getLogger("sharded_orm.lookups")

#: Seconds after which an entry without a row counts as left behind, if the database cannot tell whether
#: the session of its writer still exists.
QUARANTINE = 600.0
#: Seconds that the entries of a committed transaction wait, at most until the next one of the process,
#: before they tell that it has ended.
CLOSE_AFTER = 5.0
#: The largest number of entries that a process remembers to close, while their shards do not answer.
MAX_WAITING = 10_000


class EndedChanges:
    """Changes whose transactions have ended, while their entries do not tell so yet. Thread-safe.

    Entries are closed many at a time. The changes of a process that dies meanwhile are known by its
    sessions, which have ended with it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: list[tuple[EntryTable, str]] = []
        self._closed_at = time.monotonic()
        self._most: float = entries.BATCH

    def add(self, tokens: Iterable[tuple[EntryTable, str]]) -> None:
        """Note changes. Close the entries of all if they are many, or if some have waited.

        One statement per table. Entries of a table that does not answer wait for the next time.
        """
        with self._lock:
            self._tokens += tokens
            waited = time.monotonic() - self._closed_at
            if len(self._tokens) < self._most and waited < CLOSE_AFTER:
                return
            tokens, self._tokens, self._closed_at = self._tokens, [], time.monotonic()
        failed = in_each_table(entries.close, tokens)
        with self._lock:
            # Other processes that find a forgotten entry wait until the sessions of this process have ended.
            self._tokens = [*failed, *self._tokens][-MAX_WAITING:]
            # A table that does not answer is asked again after some time only, not by each transaction.
            self._most = math.inf if failed else entries.BATCH

    def __contains__(self, token: str) -> bool:
        with self._lock:
            return any(token == ended for _, ended in self._tokens)


def in_each_table(
    run: Callable[[EntryTable, Sequence[str]], None], tokens: Iterable[tuple[EntryTable, str]]
) -> list[tuple[EntryTable, str]]:
    """Call ``run`` for the changes of each table, and return those of tables where it has failed.

    Their transactions have ended, so an error is logged: their callers must not take it for one of them.
    """
    failed: list[tuple[EntryTable, str]] = []
    for table, of_table in _by_table(tokens).items():
        try:
            run(table, of_table)
        except Exception:
            logger.warning(
                "%d changes have left entries of lookups in %r on %r behind. They are closed when the"
                " database answers, and do no harm; 'manage.py lookups check --repair' removes"
                " those without a row.",
                len(of_table),
                table.name,
                table.alias,
                exc_info=True,
            )
            failed += [(table, token) for token in of_table]
    return failed


def _by_table(tokens: Iterable[tuple[EntryTable, str]]) -> Mapping[EntryTable, list[str]]:
    by_table: defaultdict[EntryTable, list[str]] = defaultdict(list)
    for table, token in tokens:
        by_table[table].append(token)
    return by_table


ended_changes = EndedChanges()


def _forget_changes_of_parent() -> None:
    # Another thread of the parent may have held the lock at the fork.
    ended_changes.__init__()  # type: ignore[misc]  # the object is known by many names


os.register_at_fork(after_in_child=_forget_changes_of_parent)


class EntryChange(StatementChange):
    """What one statement has changed in lookups. It is complete if each row has its entries."""

    def __init__(self) -> None:
        self.fresh, self.taken, self.old = (uuid4().hex for _ in range(3))
        self.has_fresh = self.has_taken = self.has_old = False
        #: The entries of the new values.
        self.places: Collection[Place] = ()
        #: The tables with its entries.
        self.tables: set[EntryTable] = set()

    def note_tables(self, places: Iterable[Place]) -> None:
        """Note that the entries at ``places`` are about to be written."""
        self.tables.update(entries.table_of(place.lookup, place.value) for place in places)

    def in_tables(self, tokens: Iterable[str]) -> Iterator[tuple[EntryTable, str]]:
        """Return ``tokens``, each with every table that may have its entries."""
        return product(self.tables, tokens)

    def tokens(self) -> tuple[str, ...]:
        return self.fresh, self.taken, self.old

    def surplus(self, stands: bool) -> list[str]:
        """Return the tokens of entries that no row needs after the end of the transaction.

        These are the entries of old values if the change stands, and the new entries if it was rolled back.

        :param stands: whether the statement is committed; otherwise it was rolled back.
        """
        if stands:
            return [self.old] if self.has_old else []
        return [self.fresh] if self.has_fresh else []

    def rest(self, stands: bool) -> list[str]:
        """Return the tokens of the other entries, which stay."""
        if stands:
            return [self.fresh, self.taken] if self.has_fresh else []
        return [self.taken, self.old] if self.has_taken or self.has_old else []


class TransactionEntries(StatementWatcher[EntryChange]):
    """The changes of one transaction.

    :param connection: the connection object of the shard, in a transaction.
    """

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self._began = time.monotonic()
        self._is_committed_at_once = entries.is_committed_at_once()
        self._may_be_committed = False
        self._writer: str | None = None

    @property
    def writer(self) -> str:
        """The session of the transaction. Call this after the first statement of the transaction only."""
        if self._writer is None:
            self._writer = entries.writer_text(self._connection.session_id())
        return self._writer

    def owns(self, token: str) -> bool:
        return any(token in change.tokens() for change in self._changes)

    @contextmanager
    def change(self) -> Iterator[EntryChange]:
        """Return a context manager around one statement and the changes of its entries."""
        change = EntryChange()
        self._changes.append(change)
        try:
            yield change
        except BaseException:
            # Roll back, as Model.save_base() of Django does after an error. If the caller commits in
            # spite of this, before_commit() refuses.
            self._connection.needs_rollback = True
            raise
        change.is_complete = True

    # -- The end of the transaction ---------------------------------------------------------

    def before_commit(self) -> None:
        """Refuse a commit after which a row would be without its entry.

        :raises LookupRefused: a statement is committed whose entries could not be written.
        :raises LookupExpired: others have taken this transaction's writer for dead.
        """
        if self.incomplete():
            raise LookupRefused(
                f"The transaction on {self._connection.alias!r} was rolled back: it contains rows whose"
                " lookups could not be written. Let the error of the write leave the block of atomic()."
            )
        if time.monotonic() - self._began > QUARANTINE / 2:
            self._renew()

    def _renew(self) -> None:
        """Make sure that nobody has taken this transaction's entries over, nor will during the COMMIT."""
        own: set[Place] = set()
        tokens = (pair for change in self._changes for pair in change.in_tables(change.tokens()))
        for table, of_table in _by_table(tokens).items():
            entries.renew(table, of_table)
            own |= {entry.place for entry in entries.of_tokens(table, of_table)}
        places = {p for change in self._changes if not change.is_undone for p in change.places}
        if not places <= own:
            raise LookupExpired(
                f"The transaction on {self._connection.alias!r} was rolled back: it was open for more"
                f" than {QUARANTINE:g} s after it wrote rows with lookups, and others have taken"
                f" values over: {sorted(places - own)[:3]!r}. Use shorter transactions."
            )

    def may_commit(self) -> None:
        self._may_be_committed = True

    def ended(self, committed: bool | None) -> None:
        if committed is None or (self._may_be_committed and not committed):
            return  # Entries without rows do no harm.
        if not self._is_committed_at_once:
            return  # The test case rolls the entries back.
        ends = [(change, bool(committed) and not change.is_undone) for change in self._changes]
        surplus = (p for change, stands in ends for p in change.in_tables(change.surplus(stands)))
        left = in_each_table(entries.remove, surplus)
        # Others may wait for values that were rolled back, so these are closed now.
        undone = (change for change, stands in ends if not stands)
        rest = (pair for change in undone for pair in change.in_tables(change.rest(False)))
        left += in_each_table(entries.close, rest)
        done = (change for change, stands in ends if stands)
        ended_changes.add(
            chain(left, (p for change in done for p in change.in_tables(change.rest(True))))
        )
