"""Triggers that record changed rows of a shard in a journal, and fences that refuse changes.

A *watched key* is a value of the shard key with a row in the table of fences. While its fence is open,
triggers write the primary key of each changed row to the journal. While the fence is closed, they
refuse each change (:mod:`~sharded_orm.backends.fence`). Raw SQL and other programs are stopped as
well, because the database does it.

Each backend derives a class from :class:`ChangeCapture`; ``connection.change_capture()`` opens one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import md5
from typing import Any, ClassVar, Final

from sharded_orm.backends.fence import CLOSED_TABLE, MARKER
from sharded_orm.backends.own_session import OwnSession
from sharded_orm.backends.snapshot import OWN_PREFIX
from sharded_orm.exceptions import MoveFailed

FENCES: Final = f"{OWN_PREFIX}fence"
JOURNAL: Final = f"{OWN_PREFIX}journal"
EVENTS: Final = ("INSERT", "UPDATE", "DELETE")


@dataclass(frozen=True)
class KeyLink:
    """A foreign key from a table without the shard key to the row that has the key.

    :param column: the foreign key's column.
    :param table: the table to which it refers.
    :param target: the column of ``table`` to which it refers.
    """

    column: str
    table: str
    target: str


@dataclass(frozen=True)
class CapturedTable:
    """A table whose changes are recorded.

    :param pks: the columns that the journal records to name a row: those of the primary key, and
        perhaps others.
    :param key: the column with the shard key, in this table or in the last table of ``links``.
    :param links: the foreign keys that lead from this table to the table with the shard key; empty
        if this table has the shard key itself.
    :param fresh_ids: whether a row gets a new primary key when it moves to another shard. No other
        row refers to such a row.
    :param fence: the value of the one fence to which all rows of the table belong. It must be an
        identifier. None if each row belongs to the fence of its shard key.
    """

    name: str
    pks: tuple[str, ...]
    key: str
    links: tuple[KeyLink, ...] = ()
    fresh_ids: bool = False
    fence: str | None = None

    @property
    def refusal(self) -> str:
        """The message with which the database refuses a change while the fence is closed."""
        return MARKER if self.fence is None else CLOSED_TABLE


@dataclass(frozen=True)
class Change:
    """An entry of the journal: the row with the primary key ``pk`` was inserted, changed or deleted.

    :param fence: the number of the fence whose key the row has.
    """

    number: int
    table: str
    pk: tuple[Any, ...]
    fence: int


class ChangeCapture(OwnSession, ABC):
    """The fences, the journal and the triggers of one shard."""

    #: A query for the names of all triggers on the shard.
    _all_triggers: ClassVar[str]

    @abstractmethod
    def exclusively(self, patience: float) -> AbstractContextManager[None]:
        """Hold a lock during the ``with`` block, so that nobody else creates or drops triggers.

        :param patience: seconds to wait for another session that holds the lock.
        :raises django.db.OperationalError: the other session has held the lock for longer.
        """

    def end_sessions(self, number: int | None = None) -> int:
        """End the sessions of another mover that holds locks on this shard. Return their number.

        Their transactions are rolled back. Call this only if no process may work on the shard any more,
        such as one that was paused while another has taken its work over. SQLite has no sessions.

        :param number: the number of the move, if it is known.
        :raises django.db.DatabaseError: the account may not end them.
        """
        return 0

    @abstractmethod
    def check_privileges(self, *, sessions: bool = True) -> None:
        """Make sure that the account of this session may do the work. Leaves nothing behind.

        :param sessions: whether :meth:`sessions` will be needed.
        :raises MoveRefused: it may not; each reason says what to grant.
        """

    # ##### Fences #####

    def prepare(self) -> None:
        """Create the tables of fences and of the journal. Does nothing if they exist."""
        for statement in self._table_statements():
            self._rows(statement)

    @abstractmethod
    def is_prepared(self) -> bool:
        """Whether the table of fences exists, so :meth:`prepare` was called before."""

    def watch(self, number: int, value: Any, *, closed: bool = False) -> None:
        """Add the fence of a key. Does nothing if the fence exists.

        The triggers see the fence at once. But transactions that have written before do not see it,
        so call :meth:`install` afterwards. If an earlier operation has left a closed fence of the
        same key, that fence gets the new number and state.

        :param number: identifies the fence on this shard.
        :param value: the key, as the database stores it.
        :param closed: whether changes are refused from the beginning.
        :raises MoveFailed: another fence of the key is open, so another operation is under way.
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
        """Return the states of all fences, "open" or "closed", by number."""
        rows = self._rows(f"SELECT id, state FROM {self._quote(FENCES)}")
        return {int(number): str(state) for number, state in rows}

    @abstractmethod
    def close(self, number: int, patience: float) -> None:
        """Close a fence. Afterwards, no transaction that has changed rows of the key is open.

        :param patience: seconds to wait for such transactions. Meanwhile new changes of the key wait.
        :raises django.db.OperationalError: they took longer. The fence is as it was.
        :raises MoveFailed: there is no such fence.
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
        """Let changes of the key pass again, and record them again.

        :raises MoveFailed: there is no such fence.
        """
        self._set_state(number, "open")

    def admit(self, number: int) -> None:
        """Remove a fence that was closed from the beginning, so that writes of its key pass.

        Does nothing if there is no such fence. One statement: writers are waiting for it.
        """
        self._rows(f"DELETE FROM {self._quote(FENCES)} WHERE id = %s", number)

    def unwatch(self, number: int) -> None:
        """Remove a fence and what the journal has of its key. Does nothing if there is no fence."""
        if not self.is_prepared():
            return  # Another operation has removed the last fence, and the tables.
        # The fence goes last: as long as it is there, nobody drops the tables.
        self._rows(f"DELETE FROM {self._quote(JOURNAL)} WHERE fence = %s", number)
        self._rows(f"DELETE FROM {self._quote(FENCES)} WHERE id = %s", number)

    # ##### Sessions of others #####

    def sessions(self) -> dict[str, Any] | None:
        """Return a marker of the sessions that are open on the server now, as JSON values.

        None if there is no server (SQLite), so nobody knows.
        """
        return None

    def sessions_left(self, markers: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return for each marker how many of its sessions may still send an old statement.

        A process may have prepared a statement before the marker was made. Its session no longer
        counts once it has ended a statement that began after the marker, unless a transaction from
        before the marker is still open. In doubt, a session counts. If any session of a marker is
        open, the call takes 0.1 to 0.8 seconds for all markers together.

        :param markers: what :meth:`sessions` has returned on this server, also in another process.
        :raises django.db.OperationalError: the account may not see the sessions of others.
        """
        raise NotImplementedError

    # ##### Journal #####

    def changes(self, number: int, limit: int = 1000) -> list[Change]:
        """Return committed changes of a key that were not forgotten yet, oldest first.

        An entry may appear below others that were returned before, because a transaction writes its
        entries before it commits. So forget exactly the entries that were handled.
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
        """Return how many changes of a key :meth:`changes` would return without a limit."""
        count = f"SELECT COUNT(*) FROM {self._quote(JOURNAL)} WHERE fence = %s"
        return int(self._rows(count, number)[0][0])

    def forget(self, changes: Iterable[Change]) -> None:
        """Remove entries from the journal, after the rows that they name were handled."""
        numbers: dict[int, list[int]] = {}
        for change in changes:
            numbers.setdefault(change.fence, []).append(change.number)
        for fence, entries in numbers.items():
            for start in range(0, len(entries), 500):
                batch = entries[start : start + 500]
                marks = ", ".join(["%s"] * len(batch))
                # The numbers of entries begin anew if the journal was dropped and created again. So
                # a process that was paused meanwhile must not delete those of another fence.
                self._rows(
                    f"DELETE FROM {self._quote(JOURNAL)} WHERE fence = %s AND id IN ({marks})",
                    fence,
                    *batch,
                )

    # ##### Triggers #####

    @abstractmethod
    def install(self, tables: Sequence[CapturedTable], patience: float) -> None:
        """Create the triggers that are missing, and wait for the transactions that did not see them.

        Afterwards, each transaction that changes a row of a watched key writes to the journal, or
        was committed before. Can be repeated.

        :param patience: seconds to try. Each attempt waits for milliseconds only, so that the
            statements of others do not queue behind it.
        :raises django.db.OperationalError: a transaction on one of the tables took longer.
        """

    @abstractmethod
    def uninstall(self, patience: float) -> bool:
        """Drop all triggers, and both tables, unless there is a fence. Return whether it did so.

        :raises django.db.OperationalError: a transaction on one of the tables took longer.
        """

    def tables_with_silent_changes(self, tables: Sequence[CapturedTable]) -> list[str]:
        """Return the names of those tables whose rows the database may change without a trigger.

        MariaDB and MySQL do so if a foreign key of the table cascades.
        """
        return []

    def triggers(self) -> set[str]:
        """Return the names of the triggers of this module on the shard."""
        names = (str(name) for (name,) in self._rows(self._all_triggers))
        return {name for name in names if name.startswith(OWN_PREFIX)}

    @abstractmethod
    def _table_statements(self) -> Iterator[str]: ...

    @abstractmethod
    def _stored_key(self, value: Any) -> Any:
        """Return the key as the table of fences stores it."""

    def _parse_pk(self, text: str) -> tuple[Any, ...]:
        return tuple(
            bytes.fromhex(part).decode("utf-8", "surrogateescape") for part in text.split(",")
        )

    def _key_of(self, table: CapturedTable, row: str) -> str:
        """Return SQL for the shard key of a row.

        :param row: NEW or OLD.
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
    """Return the name of a trigger. It fits into 64 characters, whatever the table is called."""
    return (
        f"{OWN_PREFIX}{md5(table.encode(), usedforsecurity=False).hexdigest()[:16]}_{event.lower()}"
    )


def rows_of(event: str) -> tuple[str, ...]:
    """Return which rows a trigger sees on ``event``: NEW, OLD or both."""
    return {"INSERT": ("NEW",), "DELETE": ("OLD",)}.get(event, ("OLD", "NEW"))
