"""Triggers that record changed rows of a shard in a journal (a table), and fences that refuse
changes.

A *watched key* is a shard key with a row in the table of fences. While its fence is open, triggers
write the primary key of each changed row to the journal. While the fence is closed, they refuse
each change (:mod:`~sharded_orm.backends.fence_messages`), also by raw SQL and other programs.

Each backend derives a class from :class:`ChangeCapture`. ``connection.change_capture()`` returns an
object of that class, which has a session of its own.
"""

from __future__ import annotations

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
    """A foreign key by which the shard key of a row is found, if its table has no shard key itself.

    :param column: the foreign key's column.
    :param table: the table to which the column refers.
    :param target: the column of ``table`` to which it refers.
    """

    column: str
    table: str
    target: str


@dataclass(frozen=True)
class CapturedTable:
    """A table whose changes are recorded.

    :param pks: the columns that identify a row in the journal: the primary key, and perhaps others.
    :param key: the column with the shard key, in this table or in the last table of ``links``.
    :param links: the foreign keys that lead from this table to the table with the shard key; empty
        if this table has the shard key itself.
    :param fresh_ids: whether a row gets a new primary key when it moves to another shard. No other
        row refers to such a row.
    :param fence: the name of the one fence for all rows of this table, an identifier. None if each
        shard key has a fence of its own.
    """

    name: str
    pks: tuple[str, ...]
    key: str
    links: tuple[KeyLink, ...] = ()
    fresh_ids: bool = False
    fence: str | None = None

    @property
    def refusal(self) -> str:
        """The error message of the database when a closed fence refuses a change of a row.

        The fence belongs to the row's shard key or, if :attr:`fence` is set, to the whole table.
        """
        return MARKER if self.fence is None else CLOSED_TABLE


@dataclass(frozen=True)
class Change:
    """An entry of the journal (the table of changed rows): the row with the primary key ``pk`` was
    inserted, changed or deleted.

    :param number: the number of the entry.
    :param fence: the number of the fence (a row of the table of fences) that belongs to the row's
        key.
    """

    number: int
    table: str
    pk: tuple[Any, ...]
    fence: int


class ChangeCapture(OwnSession, ABC):
    """Base class for the fences, the journal and the triggers of one shard.

    A fence refuses changes of a shard key's rows while the key moves. The journal records the
    changed rows of the key.
    """

    #: The query for the names of all triggers on the shard.
    _all_triggers: ClassVar[str]

    @abstractmethod
    def exclusively(self, patience: float) -> AbstractContextManager[None]:
        """Hold a lock during the ``with`` block, so that no other session creates or drops triggers.

        :param patience: seconds to wait for another session that holds the lock.
        :raises django.db.OperationalError: the other session held the lock for more than ``patience``.
        """

    def end_sessions(self, number: int | None = None) -> int:
        """End the sessions of another process that moves rows and holds locks on this shard.

        The server rolls back their transactions. Call this method only if the other process must
        not go on: for example, it was paused, and this process has taken over its move.

        :param number: the number of the move, if it is known.
        :return: how many sessions were ended; always 0 on SQLite, which has no sessions.
        :raises django.db.DatabaseError: the account may not end the sessions.
        """
        return 0

    @abstractmethod
    def check_privileges(self, *, sessions: bool = True) -> None:
        """Check that this session's account has all privileges to create and use fences, the
        journal of changed rows, and triggers. Creates nothing.

        :param sessions: whether :meth:`sessions` will be needed.
        :raises MoveRefused: a privilege is missing. Each reason names what to grant.
        """

    # ##### Fences #####

    def prepare(self) -> None:
        """Create the table of fences, which refuse changes, and the journal, which records them.

        Does nothing if the tables exist.
        """
        for statement in self._table_statements():
            self._rows(statement)

    @abstractmethod
    def is_prepared(self) -> bool:
        """Whether :meth:`prepare` has already created the table of fences, which refuse changes."""

    def watch(self, number: int, value: Any, *, closed: bool = False) -> None:
        """Add the fence of a shard key. Does nothing if the fence exists.

        The triggers see the fence at once. But an open transaction may have written before it
        existed: call :meth:`install` afterwards, which waits for such transactions. A closed fence
        of the same key that an earlier operation has left gets the new number and state.

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
        """Return the state of each fence as number -> "open" or "closed". A closed fence refuses
        changes.
        """
        rows = self._rows(f"SELECT id, state FROM {self._quote(FENCES)}")
        return {int(number): str(state) for number, state in rows}

    @abstractmethod
    def close(self, number: int, patience: float) -> None:
        """Close a fence, so that it refuses changes of its key. Return when every transaction that
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
        """Open a fence again. Changes of its key are then no longer refused, but recorded.

        :param number: the number of the fence.
        :raises MoveFailed: the fence does not exist.
        """
        self._set_state(number, "open")

    def admit(self, number: int) -> None:
        """Remove a fence that was closed from the beginning. Writes of its key are then accepted.

        Does nothing if the fence does not exist. Sends only one statement, because writers are
        waiting.
        """
        self._rows(f"DELETE FROM {self._quote(FENCES)} WHERE id = %s", number)

    def unwatch(self, number: int) -> None:
        """Remove the fence of a key, and the journal's entries about the key. Does nothing if the
        fence does not exist.

        Without a fence, triggers neither record nor refuse changes of the key.
        """
        if not self.is_prepared():
            # There is nothing to delete: another operation has removed the last fence, and has
            # dropped the tables.
            return

        # Delete the row of the fence last. As long as it exists, no other process drops the journal
        # and the table of fences.
        self._rows(f"DELETE FROM {self._quote(JOURNAL)} WHERE fence = %s", number)
        self._rows(f"DELETE FROM {self._quote(FENCES)} WHERE id = %s", number)

    # ##### Sessions of other processes #####

    def sessions(self) -> dict[str, Any] | None:
        """Return a marker: JSON values that identify all sessions which are open on the server now.

        Pass the marker to :meth:`sessions_left`, to learn how many of these sessions are left.
        Return None for SQLite, which has no list of open sessions.
        """
        return None

    def sessions_left(self, markers: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return for each marker how many of its sessions may still send an old statement.

        A marker lists the sessions that were open at one moment. A statement is old if a process
        may have built it before that moment. A session stops counting when it has run a later
        statement, and its earlier transactions have ended. In doubt, a session counts.

        If any session of a marker is open, the call takes 0.1 to 0.8 seconds for all markers
        together.

        :param markers: results of :meth:`sessions` on this server, even from another process.
        :raises django.db.OperationalError: the account may not see the sessions of other accounts.
        """
        raise NotImplementedError

    # ##### Journal #####

    def changes(self, number: int, limit: int = 1000) -> list[Change]:
        """Return entries of the journal (the table of changed rows) about committed changes of a
        key, the lowest number first.

        A later call may return lower numbers, because a transaction writes its entries before it
        commits. So pass to :meth:`forget` exactly the entries that were handled.

        :param number: the number of the key's fence.
        :param limit: the most entries to return.
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
        """Return how many recorded changes of a key the journal still has, because :meth:`forget`
        was not called for them yet.

        :param number: the number of the fence, the row that makes triggers record the key's
            changes.
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
                # Delete an entry of the journal only if it belongs to this fence. If the journal is
                # dropped and created again, the numbers of entries begin at 1 again. So a process that
                # was paused meanwhile might otherwise delete entries about another key.
                self._rows(
                    f"DELETE FROM {self._quote(JOURNAL)} WHERE fence = %s AND id IN ({marks})",
                    fence,
                    *batch,
                )

    # ##### Triggers #####

    @abstractmethod
    def install(self, tables: Sequence[CapturedTable], patience: float) -> None:
        """Create the missing triggers, and wait for the transactions that began without them.

        Afterwards, every change of a row of a watched key is in the journal, or was committed
        before the call. May be called again.

        :param patience: seconds to try. Each attempt waits for milliseconds only, so that the
            statements of other sessions do not queue behind it.
        :raises django.db.OperationalError: a transaction used one of the tables for longer than
            ``patience``.
        """

    @abstractmethod
    def uninstall(self, patience: float) -> bool:
        """Drop all triggers, the table of fences (by which triggers refuse changes) and the journal
        of changed rows, unless a fence exists.

        :return: whether they were dropped.
        :raises django.db.OperationalError: a transaction used one of the tables for more than
            ``patience`` seconds.
        """

    def tables_with_silent_changes(self, tables: Sequence[CapturedTable]) -> list[str]:
        """Return the names of those tables whose rows the database may change without calling a
        trigger.

        MariaDB and MySQL do that if a foreign key of the table has an action such as CASCADE.
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
        """Return a shard key in the form in which the table of fences (by which triggers refuse
        changes) stores it.
        """

    def _parse_pk(self, text: str) -> tuple[Any, ...]:
        return tuple(
            bytes.fromhex(part).decode("utf-8", "surrogateescape") for part in text.split(",")
        )

    def _key_of(self, table: CapturedTable, row: str) -> str:
        """Return an SQL expression for the shard key of the row for which a trigger was called.

        :param row: the name of the row in a trigger: NEW or OLD.
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
    """Return the name of the trigger of a table. It has at most 64 characters, whatever the table's
    name.

    :param event: INSERT, UPDATE or DELETE.
    """
    return (
        f"{OWN_PREFIX}{md5(table.encode(), usedforsecurity=False).hexdigest()[:16]}_{event.lower()}"
    )


def rows_of(event: str) -> tuple[str, ...]:
    """Return the names of the rows that a trigger sees on ``event``: NEW, OLD or both."""
    return {"INSERT": ("NEW",), "DELETE": ("OLD",)}.get(event, ("OLD", "NEW"))
