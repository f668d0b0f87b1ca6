"""Triggers that record which rows of a shard change, and fences that refuse changes.

A long operation, such as the move of a shard key to another shard, adds a fence for the key: a row
in the table of fences. A fence is open or closed. While it is open, triggers write the primary key
of each changed row of the shard key to a table, the journal. While it is closed, the triggers
refuse each change of such a row (:mod:`~sharded_orm.backends.fence_messages`). The triggers also
see changes by raw SQL and by other programs. But in some tables, the database makes changes without
calling triggers; see :meth:`ChangeCapture.tables_with_silent_changes`.

Each backend derives a class from :class:`ChangeCapture`. ``connection.change_capture()`` returns an
object of that class, which has a session of its own.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import md5
from typing import Any, ClassVar, Final

from sharded_orm.backends.fence_messages import CLOSED_TABLE, MARKER
from sharded_orm.backends.own_session import OwnSession
from sharded_orm.backends.snapshot import OWN_PREFIX
from sharded_orm.exceptions import MoveFailed

FENCES: Final = f"{OWN_PREFIX}fence"
JOURNAL: Final = f"{OWN_PREFIX}journal"
EVENTS: Final = ("INSERT", "UPDATE", "DELETE")


@dataclass(frozen=True)
class KeyLink:
    """A foreign key of a table whose rows move.

    It may lead from a table without a shard key to the table that has the shard key. For example,
    comments belong to photos, and only photos have a shard key. Then the link is the foreign key of
    the comments.

    :param column: the foreign key's column.
    :param table: the table to which the column refers.
    :param target: the column of ``table`` to which it refers.
    """

    column: str
    table: str
    target: str


@dataclass(frozen=True)
class CapturedTable:
    """A table whose changed rows the triggers record.

    :param pks: the columns that identify a row in the journal of changes: the primary key, and
        perhaps others.
    :param key: the column with the shard key, in this table or in the last table of ``links``.
    :param links: the foreign keys that lead, one after the other, from this table to the table with
        the shard key; empty if this table has the shard key itself.
    :param fresh_ids: whether a row gets a new primary key when it moves to another shard, because
        another row may have the old primary key there. True for the automatic table of a
        many-to-many field, if the database makes its ids. No other row may refer to such a row.
    :param fence: the value that names the fence, if all rows of the table have the same fence. None
        if each shard key has a fence of its own.
    :param copies: the foreign keys to tables with copies of global rows. Each shard has all of these
        rows, so they do not move.
    """

    name: str
    pks: tuple[str, ...]
    key: str
    links: tuple[KeyLink, ...] = ()
    fresh_ids: bool = False
    fence: str | None = None
    copies: tuple[KeyLink, ...] = ()

    @property
    def refusal(self) -> str:
        """The message of the error with which the database refuses a change of a row while the
        fence is closed. There is one message for the fence of a shard key, and another one for the
        fence of a whole table (see :attr:`fence`).
        """
        return MARKER if self.fence is None else CLOSED_TABLE


@dataclass(frozen=True)
class Change:
    """An entry of the journal (the table of changed rows). It says that the row with the primary
    key ``pk`` was inserted, changed or deleted.

    :param number: the number of the entry.
    :param fence: the number of the fence for the row's shard key, or for the whole table.
    """

    number: int
    table: str
    pk: tuple[Any, ...]
    fence: int


class ChangeCapture(OwnSession, ABC):
    """Base class of the objects that create and use the triggers of one shard.

    The triggers are needed, for example, while a shard key moves to another shard. They record the
    changed rows of the key in a table, the journal, and refuse changes while the key's fence is
    closed.
    """

    #: The SQL query that returns the names of all triggers on the shard.
    _all_triggers: ClassVar[str]

    @abstractmethod
    def exclusively(self, patience: float) -> AbstractContextManager[None]:
        """Hold a lock during the ``with`` block, so that no other operation of this library creates
        or drops triggers meanwhile.

        :param patience: seconds to wait for another session that holds the lock.
        :raises django.db.OperationalError: the other session held the lock for more than
            ``patience``.
        """

    def end_sessions(self, number: int | None = None) -> int:
        """End the sessions of another process that moves rows and holds locks on this shard.

        The server rolls back their transactions. Call this method only if the other process must
        not go on. For example, it was paused for a long time, and this process has taken over its
        move.

        :param number: the number of the move, if it is known.
        :return: how many sessions were ended; always 0 on SQLite, which has no sessions.
        :raises django.db.DatabaseError: the account may not end the sessions.
        """
        return 0

    @abstractmethod
    def check_privileges(self, *, sessions: bool = True) -> None:
        """Check that this session's account may create and use the triggers, the table of fences
        (which refuse changes) and the journal of changed rows. Creates nothing.

        :param sessions: whether :meth:`sessions` will be called, which needs a further privilege.
        :raises MoveRefused: a privilege is missing. Each reason names what to grant.
        """

    # ##### Fences #####

    def prepare(self) -> None:
        """Create the table of fences (which make triggers refuse changes) and the journal (the
        table in which triggers record changes).

        Does nothing if the tables exist.
        """
        for statement in self._table_statements():
            self._rows(statement)

    @abstractmethod
    def is_prepared(self) -> bool:
        """Whether the table of fences exists, which :meth:`prepare` creates."""

    def watch(self, number: int, value: Any, *, closed: bool = False) -> None:
        """Add the fence of a shard key: from now on, triggers record or refuse changes of the key's
        rows.

        Does nothing if the fence exists. If an earlier operation has left a closed fence of the
        key, that fence gets the new number and state.

        A transaction that is open now may have changed rows before the fence existed, and no
        trigger has recorded these changes. So call :meth:`install` afterwards, which waits for such
        transactions.

        :param number: identifies the fence on this shard.
        :param value: the key, as the database stores it.
        :param closed: whether the fence refuses changes from the beginning.
        :raises MoveFailed: another fence of the key is open, so another operation is in progress.
        """
        state, stored = "closed" if closed else "open", self._stored_key(value)
        fences = self._quote(FENCES)
        there = self._rows(f"SELECT id, state FROM {fences} WHERE value = %s", stored)
        if not there:
            self._rows(
                f"INSERT INTO {fences} (id, value, state) VALUES (%s, %s, %s)",
                number,
                stored,
                state,
            )
            return
        former = int(there[0][0])
        if former == number:
            return
        self._change_fence(
            f"UPDATE {fences} SET id = %s, state = %s WHERE id = %s AND state = 'closed'",
            former,
            number,
            state,
            former,
        )
        self._rows(f"DELETE FROM {self._quote(JOURNAL)} WHERE fence = %s", former)

    def fences(self) -> dict[int, str]:
        """Return the state of each fence: a dict that maps the fence's number to "open" or
        "closed". A closed fence refuses changes.
        """
        rows = self._rows(f"SELECT id, state FROM {self._quote(FENCES)}")
        return {int(number): str(state) for number, state in rows}

    @abstractmethod
    def close(self, number: int, patience: float) -> None:
        """Close a fence, so that it refuses changes of its key. Wait until every transaction that
        has changed rows of the key has ended.

        :param number: the number of the fence.
        :param patience: seconds to wait for such transactions. Meanwhile, new changes of the key
            wait.
        :raises django.db.OperationalError: a transaction stayed open for longer than ``patience``.
            The fence is unchanged.
        :raises MoveFailed: the fence does not exist.
        """

    def _close(self, number: int) -> None:
        self._set_state(number, "closed")

    def _set_state(self, number: int, state: str) -> None:
        update = f"UPDATE {self._quote(FENCES)} SET state = %s WHERE id = %s"
        self._change_fence(update, number, state, number)

    def _change_fence(self, update: str, number: int, *params: Any) -> None:
        with self._connection.cursor() as cursor:
            cursor.execute(update, params)
            if cursor.rowcount == 1:
                return
        raise MoveFailed(
            f"Fence {number} on {self._connection.alias!r} is not as it should be: another process"
            " works on this key, or has ended its move. Look at the move before you run it again."
        )

    def reopen(self, number: int) -> None:
        """Open a closed fence again. Changes of its key are then no longer refused, but recorded in
        the journal.

        :param number: the number of the fence.
        :raises MoveFailed: the fence does not exist.
        """
        self._set_state(number, "open")

    def admit(self, number: int) -> None:
        """Remove the fence on the shard to which a key has moved, so that the key's rows can be
        written there.

        This fence was closed while the rows were copied. Does nothing if the fence does not exist.
        Sends only one statement, because writers wait until the fence is gone.
        """
        self._rows(f"DELETE FROM {self._quote(FENCES)} WHERE id = %s", number)

    def unwatch(self, number: int) -> None:
        """Remove the fence of a key, and the key's entries in the journal. Does nothing if the
        fence does not exist.

        From then on, triggers neither record nor refuse changes of the key.
        """
        if not self.is_prepared():
            # The tables do not exist, because another operation has removed the last fence, and
            # then dropped the tables. So there is nothing to delete.
            return

        # Delete the row of the fence last. As long as there is a fence, no other process drops the
        # two tables from which this method deletes.
        self._rows(f"DELETE FROM {self._quote(JOURNAL)} WHERE fence = %s", number)
        self._rows(f"DELETE FROM {self._quote(FENCES)} WHERE id = %s", number)

    # ##### Sessions of other processes #####

    def sessions(self) -> dict[str, Any] | None:
        """Return a marker: JSON values that list all sessions which are open on the server now.

        The marker helps to find out when no session can send an outdated statement any more. Pass
        it to :meth:`sessions_left` later, which returns how many of these sessions may still send a
        statement that was built before now. Return None for SQLite, which has no list of open
        sessions.
        """
        return None

    def sessions_left(self, markers: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return for each marker how many of its sessions may still send an outdated statement.

        For example, a process has looked up the shard of a key, built a statement, and was then
        paused while the key moved. If it goes on, its statement reaches the shard that the key has
        left.

        A marker lists the sessions that were open at one moment. A statement is outdated if a
        process may have built it before that moment. A session of the marker no longer counts when
        it has run a later statement, and its earlier transactions have ended. If this cannot be
        found out, the session counts.

        If any session of a marker is still open, the call takes 0.1 to 0.8 seconds for all markers
        together.

        :param markers: results of :meth:`sessions` on this server, even from another process.
        :raises django.db.OperationalError: the account may not see the sessions of other accounts.
        """
        raise NotImplementedError

    # ##### Journal #####

    def changes(self, number: int, limit: int = 1000) -> list[Change]:
        """Return entries of the journal (the table of changed rows) about a key, the lowest number
        first. Only entries of committed transactions are returned.

        A transaction gets the number of an entry when it changes the row, but may commit much
        later. So a later call may return lower numbers than this one. Therefore, after the rows
        were copied, pass exactly the returned entries to :meth:`forget`. Do not delete all entries
        up to a number.

        :param number: the number of the key's fence.
        :param limit: the largest number of entries to return.
        """
        rows = self._rows(
            f"SELECT id, tbl, pk FROM {self._quote(JOURNAL)} WHERE fence = %s ORDER BY id LIMIT %s",
            number,
            limit,
        )
        return [
            Change(int(row[0]), str(row[1]), self._parse_pk(str(row[2])), number) for row in rows
        ]

    def backlog(self, number: int) -> int:
        """Return how many entries about a key are in the journal, that is, how many recorded
        changes have not been copied yet. After the copy, :meth:`forget` deletes the entries.

        :param number: the number of the key's fence.
        """
        count = f"SELECT COUNT(*) FROM {self._quote(JOURNAL)} WHERE fence = %s"
        return int(self._rows(count, number)[0][0])

    def forget(self, changes: Iterable[Change]) -> None:
        """Delete entries from the journal of changes, after the changed rows were copied."""
        numbers: dict[int, list[int]] = {}
        for change in changes:
            numbers.setdefault(change.fence, []).append(change.number)
        for fence, entries in numbers.items():
            for start in range(0, len(entries), 500):
                batch = entries[start : start + 500]
                marks = ", ".join(["%s"] * len(batch))
                # Delete an entry only if it belongs to this fence. The number of the entry is not
                # enough. After the journal was dropped and created again, its numbers begin at 1
                # again. A process that was paused meanwhile still has old numbers, and would delete
                # entries about another key.
                self._rows(
                    f"DELETE FROM {self._quote(JOURNAL)} WHERE fence = %s AND id IN ({marks})",
                    fence,
                    *batch,
                )

    # ##### Triggers #####

    @abstractmethod
    def install(self, tables: Sequence[CapturedTable], patience: float) -> None:
        """Create the missing triggers, and wait for the transactions that began before the triggers
        existed.

        Afterwards, each change of a row whose key has an open fence is either in the journal, or
        was committed before this method returns. So a copy of the rows that begins now includes it.
        May be called again.

        :param patience: seconds to try. To create a trigger, the database has to lock the table.
            Each attempt waits only milliseconds for this lock, because the statements of other
            sessions wait behind it.
        :raises django.db.OperationalError: a transaction used one of the tables for longer than
            ``patience``.
        """

    def uninstall(self, patience: float) -> bool:
        """If no fence exists any more, drop all triggers, the table of fences and the journal of
        changed rows.

        :return: whether they were dropped.
        :raises django.db.OperationalError: a transaction used one of the tables for more than
            ``patience`` seconds.
        """
        with self.exclusively(patience):
            deadline = time.monotonic() + patience
            if not self.is_prepared():
                return True
            if self.fences():
                return False
            self._uninstall(deadline)
            return True

    @abstractmethod
    def _uninstall(self, deadline: float) -> None:
        """Do what :meth:`uninstall` promises. No fence exists.

        :param deadline: the time (``time.monotonic()``) until which to wait for transactions.
        """

    def tables_with_silent_changes(self, tables: Sequence[CapturedTable]) -> list[str]:
        """Return the names of the tables in which the database may change rows without calling a
        trigger.

        MariaDB and MySQL do that if a foreign key of the table has an action such as CASCADE. The
        journal would have no entries for such changes.

        :param tables: the tables to look at.
        """
        return []

    def triggers(self) -> set[str]:
        """Return the names of the triggers that this library has created on the shard."""
        names = (str(name) for (name,) in self._rows(self._all_triggers))
        return {name for name in names if name.startswith(OWN_PREFIX)}

    @abstractmethod
    def _table_statements(self) -> Iterator[str]: ...

    @abstractmethod
    def _stored_key(self, value: Any) -> Any:
        """Return a shard key in the form in which the table of fences stores it."""

    def _parse_pk(self, text: str) -> tuple[Any, ...]:
        return tuple(
            bytes.fromhex(part).decode("utf-8", "surrogateescape") for part in text.split(",")
        )

    def _key_of(self, table: CapturedTable, row: str) -> str:
        """Return an SQL expression, for use in a trigger, whose value is the shard key of the
        changed row.

        If the table has no shard key, the expression is a subquery that follows the foreign keys of
        the row. If all rows of the table have the same fence, the expression is the fixed value
        that names this fence.

        :param row: ``NEW`` or ``OLD``. By these names, a trigger refers to the row after or before
            the change.
        """
        quote = self._quote
        if table.fence is not None:
            return f"'{table.fence}'"
        if not table.links:
            return f"{row}.{quote(table.key)}"
        first, *others = table.links
        source, names = f"{quote(first.table)} l0", f"l0.{quote(first.target)}"
        for index, link in enumerate(others, start=1):
            source += (
                f" JOIN {quote(link.table)} l{index}"
                f" ON l{index}.{quote(link.target)} = l{index - 1}.{quote(link.column)}"
            )
        key = f"l{len(others)}.{quote(table.key)}"
        return f"(SELECT {key} FROM {source} WHERE {names} = {row}.{quote(first.column)})"


def trigger_name(table: str, event: str) -> str:
    """Return the name of the trigger of a table. The name contains a digest of the table's name, so
    that it stays within the limit of 64 characters.

    :param event: INSERT, UPDATE or DELETE.
    """
    return (
        f"{OWN_PREFIX}{md5(table.encode(), usedforsecurity=False).hexdigest()[:16]}_{event.lower()}"
    )


def rows_of(event: str) -> tuple[str, ...]:
    """Return the names by which a trigger can read the changed row on ``event``. ``OLD`` is the row
    before the change, and ``NEW`` is the row after it. An INSERT has only ``NEW``, a DELETE only
    ``OLD``, and an UPDATE both.
    """
    return {"INSERT": ("NEW",), "DELETE": ("OLD",)}.get(event, ("OLD", "NEW"))
