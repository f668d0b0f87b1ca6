"""Keeps track of the entries of lookups that one transaction on a shard has written.

Entries are committed at once, before the transaction itself. So some entries must be removed when
the transaction ends. After a rollback, these are the entries of the new values. After a commit,
they are the entries of the values that rows have lost.

For each statement that writes rows, there is one :class:`EntryChange`. It has three tokens, which
are random names. It writes one of them into each entry, to find the entry again. There is one token
for its new entries, one for existing entries that it took over, and one for the entries of values
that its rows lose.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, product
from typing import Any
from uuid import uuid4

from django.db import DataError, IntegrityError

from sharded_orm.backends.write_hooks.statement_changes import StatementChange, StatementWatcher
from sharded_orm.contrib.lookups import entries
from sharded_orm.contrib.lookups.entries import EntryTable, Place
from sharded_orm.contrib.lookups.exceptions import LookupExpired, LookupRefused

logger = logging.getLogger("sharded_orm.lookups")

#: Some databases, such as SQLite, cannot report whether the session that has written an entry still
#: exists. On these databases, the transaction of an entry counts as ended this number of seconds
#: after the entry was written.
QUARANTINE = 600.0
#: After a commit, the entries must be closed, which means to record in them that their transaction
#: has ended. To close the entries of many transactions together, a process waits for this number of
#: seconds. It closes them when it writes entries the next time after that.
CLOSE_AFTER = 5.0
#: If a database does not answer, the entries there cannot be closed. For each table of entries, a
#: process then remembers at most this many statements whose entries it still has to close. It gives
#: up older ones, so their entries stay open.
MAX_WAITING = 10_000
#: How often a process tries to close its entries in one table (to record that their transactions
#: have ended) if the database does not answer. The pauses are 5 s, 10 s, 20 s and so on.
CLOSE_ATTEMPTS = 10


@dataclass
class ChangesToClose:
    """Statements whose transactions have ended, and whose entries in one table must be closed.

    To close an entry means to record in it that its transaction has ended.
    """

    #: The moment of the last attempt to close the entries, as ``time.monotonic()``. Before the
    #: first attempt, the moment at which the first statement was added.
    since: float
    tokens: dict[str, None] = field(default_factory=dict)
    failures: int = 0


class EndedChanges:
    """Statements whose transactions have ended, and whose lookup entries must be closed.

    To close an entry means to record in it that its transaction has ended. A process does this some
    seconds later, by one SQL statement for the entries of many transactions. If the process dies
    before that, its entries stay open. This does no harm: other processes find out that its
    database sessions have ended, and with them its transactions. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_table: dict[EntryTable, ChangesToClose] = {}

    def add(self, tokens: Iterable[tuple[EntryTable, str]]) -> None:
        """Add statements whose transactions have ended. Close entries if it is time.

        To close an entry means to record in it that its transaction has ended. The entries of a
        table are closed if there are many, or if some have waited for :data:`CLOSE_AFTER` seconds.
        Costs one statement per table. If a database does not answer, the next attempt is made
        after a pause that doubles with each failure. After :data:`CLOSE_ATTEMPTS` failures the
        entries stay as they are.

        :param tokens: pairs (table, token of a statement).
        """
        now, due = time.monotonic(), list[tuple[EntryTable, ChangesToClose, list[str]]]()
        with self._lock:
            for table, token in tokens:
                self._by_table.setdefault(table, ChangesToClose(now)).tokens[token] = None
            for table, changes in self._by_table.items():
                is_full = len(changes.tokens) >= entries.BATCH and not changes.failures
                has_waited = now - changes.since >= CLOSE_AFTER * 2**changes.failures
                is_due = is_full or (changes.tokens and has_waited)
                if is_due and entries.blocking_transaction(table.alias) is None:
                    changes.since = now
                    due.append((table, changes, list(changes.tokens)))
        for table, changes, of_table in due:
            try:
                entries.close(table, of_table)
            except Exception:
                self._failed(table, changes)
            else:
                with self._lock:
                    for token in of_table:
                        changes.tokens.pop(token, None)
                    changes.failures = 0

    def _failed(self, table: EntryTable, changes: ChangesToClose) -> None:
        """Count a failed attempt to close entries. Only the first and the last error are logged."""
        with self._lock:
            changes.failures += 1
            is_first, is_last = changes.failures == 1, changes.failures >= CLOSE_ATTEMPTS
            # If this was the last attempt, give up all changes. Otherwise give up only the oldest
            # ones, if more than MAX_WAITING wait. The entries of these changes are never closed.
            # Other processes take their transactions for open, until the database session that
            # wrote the entries ends.
            given_up = list(changes.tokens)[: None if is_last else -MAX_WAITING]
            for token in given_up:
                del changes.tokens[token]
            if is_last:
                changes.failures = 0
        if is_first:
            _log_left(table, len(changes.tokens), "They are closed later")
        if is_last:
            logger.error(
                "The entries of %d changes of lookups in %r on %r could not be closed in %d attempts, and are"
                " left. The first attempt has logged the reason. They do no harm, but if they have no rows, their"
                " values count as taken: run 'manage.py lookups check --repair' when this process"
                " has ended.",
                len(given_up),
                table.name,
                table.alias,
                CLOSE_ATTEMPTS,
            )

    def __contains__(self, token: str) -> bool:
        with self._lock:
            return any(token in changes.tokens for changes in self._by_table.values())


def _log_left(table: EntryTable, count: int, what: str) -> None:
    logger.warning(
        "%d changes have left entries of lookups in %r on %r behind. %s, and do no harm; 'manage.py"
        " lookups check --repair' removes those without a row.",
        count,
        table.name,
        table.alias,
        what,
        exc_info=True,
    )


def in_each_table(
    run: Callable[[EntryTable, Sequence[str]], None], tokens: Iterable[tuple[EntryTable, str]]
) -> list[tuple[EntryTable, str]]:
    """Call ``run`` once for each table, with the tokens that belong to it.

    An error is logged and not raised, because the transactions have ended already. The program
    would take an error for a failure of its transaction.

    :param tokens: pairs (table, token of a statement).
    :returns: the pairs of those tables for which ``run`` has failed.
    """
    failed: list[tuple[EntryTable, str]] = []
    for table, of_table in _by_table(tokens).items():
        try:
            run(table, of_table)
        except Exception:
            _log_left(table, len(of_table), "They are closed when the database answers")
            failed += [(table, token) for token in of_table]
    return failed


def _by_table(tokens: Iterable[tuple[EntryTable, str]]) -> Mapping[EntryTable, list[str]]:
    by_table: defaultdict[EntryTable, list[str]] = defaultdict(list)
    for table, token in tokens:
        by_table[table].append(token)
    return by_table


ended_changes = EndedChanges()


def _forget_changes_of_parent() -> None:
    # After a fork, the child process begins without changes, because the parent closes their
    # entries. It gets a new lock, because a thread of the parent may have held the old lock at the
    # fork. The object itself stays, because other modules have imported it.
    ended_changes.__init__()  # type: ignore[misc]  # a subclass could have another signature; there is none


os.register_at_fork(after_in_child=_forget_changes_of_parent)


class EntryChange(StatementChange):
    """A statement that writes rows, and the entries of lookups that it has changed.

    :attr:`is_complete` is set when all rows that the statement has written have their entries.
    """

    def __init__(self) -> None:
        token = uuid4().hex[1:]
        self.fresh, self.taken, self.old = token + "f", token + "t", token + "o"
        self.has_fresh = self.has_taken = self.has_old = False
        #: The columns that identify the entries for the values that the statement writes.
        self.places: Collection[Place] = ()
        #: Maps each entry that the statement has written to the token that it wrote into the entry.
        self.tokens_by_place: dict[Place, str] = {}
        #: Whether the statement was sent to the database. Only used in autocommit, where the
        #: entries are written before the statement is sent.
        self.is_sent = False
        #: The tables in which the change has written entries.
        self.tables: set[EntryTable] = set()

    def note_tables(self, places: Iterable[Place]) -> None:
        """Record in which tables entries are about to be written.

        :param places: the columns that identify each entry.
        :raises LookupRefused: this thread has a transaction open for which the write would wait
            forever.
        """
        tables = {entries.table_of(place.lookup, place.value) for place in places}
        for table in tables:
            entries.refuse_own_lock(table)
        self.tables |= tables

    def in_tables(self, tokens: Iterable[str]) -> Iterator[tuple[EntryTable, str]]:
        """Return a pair (table, token) for each table of the change and each of ``tokens``."""
        return product(self.tables, tokens)

    def tokens(self) -> tuple[str, ...]:
        return self.fresh, self.taken, self.old

    def surplus(self, stands: bool) -> list[str]:
        """Return the tokens of the entries that no row needs after the end of the transaction.

        After a commit, these are the entries of the values that rows have lost. After a rollback,
        they are the entries of the values that rows would have got.

        :param stands: True if the statement was committed; False if it was rolled back.
        """
        if stands:
            return [self.old] if self.has_old else []
        return [self.fresh] if self.has_fresh else []

    def rest(self, stands: bool) -> list[str]:
        """Return the tokens of the entries that :meth:`surplus` does not return. These entries stay
        after the transaction, because rows may need them.

        :param stands: True if the statement was committed; False if it was rolled back.
        """
        tokens = [self.taken] if self.has_taken else []
        if stands and self.has_fresh:
            tokens.append(self.fresh)
        elif not stands and self.has_old:
            tokens.append(self.old)
        return tokens


class TransactionEntries(StatementWatcher[EntryChange]):
    """The lookup entries that one transaction has written.

    A lookup entry stores which shard key the row with a certain value has.

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
        """The text by which entries name the database session of this transaction.

        Do not read this property before the transaction has sent its first statement.
        """
        if self._writer is None:
            self._writer = entries.writer_text(self._connection.session_id())
        return self._writer

    def owns(self, token: str) -> bool:
        return any(token in change.tokens() for change in self._changes)

    @contextmanager
    def change(self) -> Iterator[EntryChange]:
        """Return a context manager for one statement of the open transaction.

        In its block, the statement is sent, and the entries of its rows are written.
        """
        change = EntryChange()
        self._changes.append(change)
        try:
            yield change
        except BaseException:
            # Roll the transaction back, as Model.save_base() of Django does after an error. If the
            # caller commits in spite of this, before_commit() raises an error.
            self._connection.needs_rollback = True
            raise
        change.is_complete = True

    @contextmanager
    def statement(self) -> Iterator[EntryChange]:
        """Return a context manager for one statement that writes rows in autocommit.

        In its block, the entries of the rows are written and committed, and then the statement is
        sent.
        """
        change = EntryChange()
        self._changes.append(change)
        try:
            yield change
        except BaseException as exc:
            self._failed(change, exc)
            raise
        self.ended(True)

    def _failed(self, change: EntryChange, exc: BaseException) -> None:
        """Decide what to do with the entries of a statement in autocommit that has failed.

        - If the rows were not written, remove the entries of the new values.
        - If the statement has ended, but nobody knows whether it has written the rows, close the
          entries, which means to record in them that their transaction has ended.
        - If the statement may still be running, leave the entries as they are.

        :param exc: the error of the statement.
        """
        # The statement is not committed if it was not sent, or if the database has refused it.
        is_undone = (
            not change.tables or not change.is_sent or isinstance(exc, IntegrityError | DataError)
        )
        # After an error, the database may still be running the statement, for example if the
        # connection was lost. Then the connection object has no session any more. So if it has one,
        # the statement has ended.
        is_over = is_undone or bool(self._connection.session_id().connection)
        if is_undone or (is_over and isinstance(exc.__cause__, self._connection.Database.Error)):
            self.ended(False)
        elif is_over and self._is_committed_at_once:
            # The error is not from the database. Python has raised it, before the statement was
            # sent or after the database has answered. The rows may be stored or not, so do not
            # remove the entries, but close them (record that their transaction has ended). The next
            # writer of a value then looks for a row with this value.
            ended_changes.add(in_each_table(entries.close, change.in_tables(change.tokens())))
        else:
            self.ended(None)

    # -- The end of the transaction ---------------------------------------------------------

    def before_commit(self) -> None:
        """Refuse the commit if a row would be stored without its entry.

        :raises LookupRefused: the transaction contains a statement whose entries could not be
            written.
        :raises LookupExpired: other transactions have taken values over, because this one was open
            too long.
        """
        if self.incomplete():
            raise LookupRefused(
                f"The transaction on {self._connection.alias!r} was rolled back: it contains rows whose"
                " lookups could not be written. Let the error of the write leave the block of atomic()."
            )
        if time.monotonic() - self._began > QUARANTINE / 2:
            self._renew()

    def _renew(self) -> None:
        """Make sure, before the commit of a long transaction, that no other one has taken its
        entries.

        After :data:`QUARANTINE` seconds, others may take over an entry, because its transaction
        seems to have died. So first set the time of all entries to now, so that they cannot be
        taken any more. Then read them, to see whether some were taken before.

        :raises LookupExpired: another transaction has taken an entry over.
        """
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
            # Nobody knows whether the rows are committed. So keep all entries. An entry without a
            # row does no harm, but a row without its entry would not be found.
            return
        if not self._is_committed_at_once:
            # Nothing needs to be removed, because the entries were written in the transaction of a
            # test, which Django's TestCase rolls back.
            return
        ends = [(change, bool(committed) and not change.is_undone) for change in self._changes]
        surplus = (p for change, stands in ends for p in change.in_tables(change.surplus(stands)))
        left = in_each_table(entries.remove, surplus)
        needless = _needless(ends)

        def remove_needless(table: EntryTable, tokens: Sequence[str]) -> None:
            for token in tokens:
                entries.remove_places(table, needless[table, token], token)

        in_each_table(remove_needless, needless)
        # Close the entries that stay after a rollback at once. As long as this transaction seems to
        # be open, no other transaction can use their values.
        undone = (change for change, stands in ends if not stands)
        rest = (pair for change in undone for pair in change.in_tables(change.rest(False)))
        left += in_each_table(entries.close, rest)
        done = (change for change, stands in ends if stands)
        ended_changes.add(
            chain(left, (p for change in done for p in change.in_tables(change.rest(True))))
        )


def _needless(
    ends: Sequence[tuple[EntryChange, bool]],
) -> Mapping[tuple[EntryTable, str], list[Place]]:
    """Find entries that no row needs, but that share their token with entries that must stay.

    Usually all entries with the same token are needed, or none of them, so they are removed by the
    token. This is not possible if a transaction has written an entry several times. For example,
    one statement inserts a row, a second one deletes it together with older rows, and then the
    transaction is rolled back. The entries of all these rows have the token of the second statement
    now. The entry of the inserted row must be removed, but those of the older rows must stay.

    :param ends: pairs (change, True if it was committed) for all changes of the transaction, in the
        order in which they were made.
    :returns: maps (table, token) to the places of the entries to be removed.
    """
    writes: defaultdict[Place, list[tuple[EntryChange, bool, str]]] = defaultdict(list)
    needless: defaultdict[tuple[EntryTable, str], list[Place]] = defaultdict(list)
    if len(ends) < 2:
        return needless
    for change, stands in ends:
        for place, token in change.tokens_by_place.items():
            writes[place].append((change, stands, token))
    for place, of_place in writes.items():
        change, stands, token = of_place[0]
        # True if the first statement that wrote the entry did not insert it. Then the entry existed
        # before the transaction, and an older row may need it.
        is_needed = token != change.fresh
        for change, stands, token in of_place:
            if stands:
                is_needed = token != change.old
        if not is_needed and token not in change.surplus(stands):
            needless[entries.table_of(place.lookup, place.value), token].append(place)
    return needless
