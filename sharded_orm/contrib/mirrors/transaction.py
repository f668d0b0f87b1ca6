"""The mirrors' part of one transaction on a shard: what it has written is delivered after its commit."""

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
    """What one statement has changed in a source.

    It is complete if each row that the statement has changed is among ``rows``: so as long as the
    statement is not sent.
    """

    is_complete = True

    def __init__(self, source: Source) -> None:
        self.source = source
        self.rows: Sequence[WrittenRow] = ()
        #: What the outbox has of the rows; None until they are recorded there.
        self.recorded: Recorded | None = None
        #: The recording of the transaction in which they were.
        self.recording = 0
        self.is_delivered = False


class TransactionChanges(StatementWatcher[SourceChange]):
    """The changes of one transaction: what is recorded before its commit, and delivered after it.

    The rows are locked by the transaction until its end. So they may get the numbers of the outbox at any
    time between their statement and the commit: the later a transaction commits, the higher its numbers are.

    :param connection: the connection object of the shard, in a transaction.
    """

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self._hook: Callable[[], None] | None = None
        #: The changes whose rows are not in the outbox yet.
        self._pending: list[SourceChange] = []
        # How often rows were recorded, and how often they had been when each savepoint was set.
        self._recordings = 0
        self._recordings_at: dict[str, int] = {}
        # Whether rows may not be stored although their statements have succeeded.
        self._may_lack_rows = False
        #: Whether the transaction may be, or has been, committed. While it is open, Django calls the
        #: hook in tests only.
        self._may_deliver = True

    def add(self, source: Source) -> SourceChange:
        """Return the change of a statement that is not executed yet."""
        change = SourceChange(source)
        self._changes.append(change)
        return change

    def add_rows(self, change: SourceChange, rows: Sequence[WrittenRow]) -> None:
        """Note the rows of a statement that was executed. They will be recorded and delivered.

        They are recorded at once if that costs as much as later.
        """
        change.rows = rows
        self._pending.append(change)
        if not self._connection.sends_with_commit:
            self._record()
        self.deliver_after_commit()

    def _record(self) -> None:
        """Write the rows into the outbox that are not there yet."""
        self._recordings += 1
        for change in self._pending:
            if not change.is_undone and change.recorded is None:
                change.recorded = record(change.source, self._connection.alias, change.rows)
                change.recording = self._recordings
        # Only now: if an error is caught by the program, what is not recorded must be recorded later.
        self._pending = []

    def deliver_after_commit(self) -> None:
        """Deliver all changes when the transaction has been committed.

        Then the writer itself, and whoever reads after it, usually finds the mirrors written. If they
        cannot be written, the writer gets no error: a relay delivers the rows later.
        """
        connection = self._connection
        hooks = connection.run_on_commit
        # One hook is enough, unless it may be dropped with a savepoint, or other hooks came after it.
        if self._hook is not None and hooks:
            savepoints, last = hooks[-1][:2]
            if last is self._hook and savepoints <= set(connection.savepoint_ids):
                return
        self._hook = partial(self._deliver)
        transaction.on_commit(self._hook, using=connection.alias, robust=True)

    def _deliver(self) -> None:
        self._hook = None  # In a TestCase, hooks that were called stay in Django's list.
        if not self._may_deliver:
            return
        self._record()  # In a TestCase nothing is committed, so it is not done yet.
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
        """Return ``entry`` without values that may not be stored: then the row is read."""
        if not self._may_lack_rows:
            return entry
        return replace(entry, written=replace(entry.written, is_new=False, inserted=None))

    # ##### The end of the transaction #####

    def before_commit(self) -> None:
        """Write the changed rows into the outbox. Refuse a commit after which the mirrors would not follow.

        :raises WriteNotFollowed: a statement is committed whose rows are not known.
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
        # What the next statement commits implicitly must be in the outbox, or no relay would find it.
        self._record()

    def savepoint(self, sid: str) -> None:
        super().savepoint(sid)
        self._recordings_at[sid] = self._recordings

    def savepoint_rolled_back(self, sid: str) -> None:
        super().savepoint_rolled_back(sid)
        since = self._recordings_at.get(sid, self._recordings)
        # What may_commit() has recorded since the savepoint is gone.
        gone = [c for c in self._changes if c.recording > since and not c.is_undone]
        for change in gone:
            change.recorded, change.recording = None, 0
        self._pending += gone

    def ended(self, committed: bool | None) -> None:
        # If the end is unknown, the transaction may be committed later. Whoever read the rows now would
        # bring their old state to the mirrors. A relay sees the outbox only after the commit.
        self._may_deliver = committed is True


class DeferrableDelivery:
    """A delivery to shards, which waits for the end of the thread's open transactions on them.

    :param groups: the groups of the shards.
    """

    def __init__(self, groups: Iterable[str]) -> None:
        self._groups = groups
        self._is_deferred = False

    def __call__(self) -> None:
        in_use = sorted(filter(in_transaction, self._groups))
        if in_use and not self._is_deferred:
            # Another transaction is open, and the delivery would become a part of it. So wait for its
            # end. (In a TestCase there is always one, so do not wait twice.)
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
    """Delivers what one transaction has written to a source, after its commit."""

    def __init__(self, source: Source, alias: str, entries: Sequence[OutboxEntry]) -> None:
        super().__init__({mirror.options.group for mirror in source.mirrors})
        self._source, self._alias, self._entries = source, alias, entries

    def deliver(self, *, may_be_rolled_back: bool) -> None:
        failures = deliver(rows_to_deliver(self._entries), self._source.mirrors)
        for pk, exc in failures.items():
            # The row stays in the outbox. The writer has committed, so it gets no error.
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
