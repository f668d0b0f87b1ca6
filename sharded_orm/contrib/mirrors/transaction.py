"""Records the rows of sources that one transaction changes, and delivers them to mirrors afterwards.

A source is a model that has mirrors. The delivery begins after the commit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from django.db import connections, transaction

from sharded_orm.backends.write_hooks.statement_changes import StatementChange, StatementWatcher
from sharded_orm.contrib.mirrors.declaration import Source
from sharded_orm.contrib.mirrors.delivery import deliver, rows_to_deliver
from sharded_orm.contrib.mirrors.exceptions import WriteNotFollowed
from sharded_orm.contrib.mirrors.outbox import OutboxEntry, Recorded, WrittenRow, record
from sharded_orm.contrib.mirrors.removal import Delivered
from sharded_orm.models.moves.confirmation import in_transaction

logger = logging.getLogger("sharded_orm.mirrors")


class SourceChange(StatementChange):
    """The rows of a source that one statement has changed.

    The change is complete if all these rows are in ``rows``, or if the statement was not sent yet.
    """

    is_complete = True

    def __init__(self, source: Source) -> None:
        self.source = source
        self.rows: Sequence[WrittenRow] = ()
        #: The function that :func:`record` has returned, which returns the outbox entries of the
        #: rows; None until the rows are in the outbox.
        self.recorded: Recorded | None = None
        #: Which of the transaction's writes to the outbox has stored these rows: 1 for the first, 2
        #: for the second, and so on. 0 if the rows are not stored there yet.
        self.recording = 0
        self.is_delivered = False


class TransactionChanges(StatementWatcher[SourceChange]):
    """The changes of sources in one transaction. They are recorded in the outbox before the commit,
    and delivered to mirrors after it.

    The transaction locks the changed rows until its end, so any time before the commit is early
    enough to record them. If another transaction changes the same row next, its outbox row gets a
    higher id.

    :param connection: the connection object of the shard, in a transaction.
    """

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self._hook: Callable[[], None] | None = None
        #: The changes whose rows are not in the outbox yet.
        self._pending: list[SourceChange] = []
        # _recordings counts how often this transaction has written to the outbox. _recordings_at
        # maps each savepoint to the count at the moment when the savepoint was set. All later
        # writes to the outbox are undone by a rollback to the savepoint.
        self._recordings = 0
        self._recordings_at: dict[str, int] = {}
        # Whether the server may have undone earlier statements of this transaction because of an
        # error, such as a deadlock. Then changed rows may be missing in the database.
        self._may_lack_rows = False
        #: Whether to deliver the changes. False if the transaction ended without a commit. True
        #: while it is open, because in a TestCase the delivery runs inside the transaction.
        self._may_deliver = True

    def add(self, source: Source) -> SourceChange:
        """Return a new :class:`SourceChange` for the rows that a statement will change.

        Must be called before the statement is sent.
        """
        change = SourceChange(source)
        self._changes.append(change)
        return change

    def add_rows(self, change: SourceChange, rows: Sequence[WrittenRow]) -> None:
        """Add the rows that a statement has changed, to be recorded in the outbox and delivered.

        They are recorded at once, unless they can be sent with the COMMIT, which is cheaper.
        """
        change.rows = rows
        self._pending.append(change)
        if not self._connection.sends_with_commit:
            self._record()
        self.deliver_after_commit()

    def _record(self) -> None:
        """Write the changed rows that are not in the outbox yet into it."""
        self._recordings += 1
        for change in self._pending:
            if not change.is_undone and change.recorded is None:
                change.recorded = record(change.source, self._connection.alias, change.rows)
                change.recording = self._recordings
        # Empty the list only after record() has succeeded. If record() raises an error that the
        # program catches, the rows must stay in the list, because they are not recorded yet.
        self._pending = []

    def deliver_after_commit(self) -> None:
        """Deliver all changes as soon as the transaction is committed.

        So the program usually finds the mirrors up to date afterwards. If the mirrors cannot be
        written, the program gets no error, because a relay delivers the changes later.
        """
        connection = self._connection
        hooks = connection.run_on_commit
        # One on-commit hook is enough for many changes. But a rollback to a savepoint removes a
        # hook that was added after the savepoint. So rely on the present hook only if it is the
        # last in Django's list, and all savepoints that were open when it was added still are.
        if self._hook is not None and hooks:
            savepoints, last = hooks[-1][:2]
            if last is self._hook and savepoints <= set(connection.savepoint_ids):
                return
        self._hook = partial(self._deliver)
        transaction.on_commit(self._hook, using=connection.alias, robust=True)

    def _deliver(self) -> None:
        # Forget the hook, so that a later change adds a new hook. In a TestCase, the old hook stays
        # in Django's list after it was called.
        self._hook = None
        if not self._may_deliver:
            return
        # Record the rows that are not in the outbox yet. In a TestCase nothing is committed, so
        # before_commit() was not called.
        self._record()
        by_source: dict[int, tuple[Source, list[OutboxEntry]]] = {}
        for change in self._changes:
            if change.is_undone or change.is_delivered:
                continue
            change.is_delivered = True
            if change.recorded is not None:
                _, entries = by_source.setdefault(id(change.source), (change.source, []))
                entries += map(self._confirmed, change.recorded())
        for source, entries in by_source.values():
            _Delivery(source, self._connection.alias, entries)()

    def _confirmed(self, entry: OutboxEntry) -> OutboxEntry:
        """Return ``entry``, without the values of its INSERT if the database may have undone the
        INSERT.

        Without these values, the delivery reads the row from the database.
        """
        if not self._may_lack_rows:
            return entry
        return replace(entry, written=replace(entry.written, is_new=False, inserted=None))

    # ##### The end of the transaction #####

    def before_commit(self) -> None:
        """Write the changed rows into the outbox, before the transaction is committed.

        :raises WriteNotFollowed: it is not known which rows a statement of the transaction has
            changed, so mirrors would miss the change.
        """
        for change in self.incomplete():
            raise WriteNotFollowed(
                f"The transaction on {self._connection.alias!r} was rolled back: it has changed rows of"
                f" {change.source.model.__name__} that could not be written into the outbox. Let the"
                " error of the write leave the block of atomic()."
            )
        self._may_lack_rows = self._connection.may_lack_statements
        if sum(len(change.rows) for change in self._pending if not change.is_undone) == 1:
            with self._connection.sent_with_commit():
                self._record()
        else:
            self._record()

    def may_commit(self) -> None:
        # The next statement may commit the transaction implicitly, as DDL does on MariaDB. So
        # record the changed rows first. If they were committed and not recorded in the outbox, no
        # relay would find them.
        self._record()

    def savepoint(self, sid: str) -> None:
        super().savepoint(sid)
        self._recordings_at[sid] = self._recordings

    def savepoint_rolled_back(self, sid: str) -> None:
        super().savepoint_rolled_back(sid)
        since = self._recordings_at.get(sid, self._recordings)
        # The rollback to the savepoint has also undone the rows of the outbox that were written
        # after it. Record these changes again before the commit.
        gone = [c for c in self._changes if c.recording > since and not c.is_undone]
        for change in gone:
            change.recorded, change.recording = None, 0
        self._pending += gone

    def ended(self, committed: bool | None) -> None:
        # Deliver only if the transaction was committed for certain. If this is unknown, the server
        # may still commit it later, and a delivery now would write the old state to the mirrors. A
        # relay sees the outbox row only after the commit, so it delivers the new state.
        self._may_deliver = committed is True


class DeferrableDelivery:
    """A delivery that waits if this thread has a transaction open on a shard of ``groups``.

    :param groups: the names of the groups to whose shards the delivery writes.
    """

    def __init__(self, groups: Iterable[str]) -> None:
        self._groups = groups
        self._is_deferred = False

    def __call__(self) -> None:
        in_use = sorted(filter(in_transaction, self._groups))
        if in_use and not self._is_deferred:
            # The delivery would become a part of the open transaction. So run it after that
            # transaction's commit. It waits only once, because in a TestCase a transaction is
            # always open.
            self._is_deferred = True
            wrapper: Any = connections[in_use[0]]
            open_aliases = sorted(wrapper.open_transactions())
            using = open_aliases[0] if open_aliases else in_use[0]
            transaction.on_commit(self, using=using, robust=True)
            return
        self.deliver(may_be_rolled_back=bool(in_use))

    def deliver(self, *, may_be_rolled_back: bool) -> None:
        raise NotImplementedError


class _Delivery(DeferrableDelivery):
    def __init__(self, source: Source, alias: str, entries: Sequence[OutboxEntry]) -> None:
        super().__init__({mirror.options.group for mirror in source.mirrors})
        self._source, self._alias, self._entries = source, alias, entries

    def deliver(self, *, may_be_rolled_back: bool) -> None:
        failures = deliver(rows_to_deliver(self._entries), self._source.mirrors)
        for pk, exc in failures.items():
            # The program gets no error, because its transaction is committed. The row is still in
            # the outbox, from where a relay delivers it.
            logger.warning(
                "row %r of %s reaches its mirrors later, by a relay: %s",
                pk,
                self._source.label,
                exc,
            )
        if not may_be_rolled_back:
            Delivered.of_thread(self._alias).add(
                entry.number for entry in self._entries if entry.written.pk not in failures
            )
