"""Sessions with a ticket server on MariaDB or MySQL: ids come from ``UPDATE`` or ``REPLACE``."""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Any

from django.db import OperationalError

from sharded_orm.forks import send_nowhere
from sharded_orm.ids.tickets.exceptions import InvalidSequence, TicketServerMisconfigured
from sharded_orm.ids.tickets.session import (
    CATALOG,
    LAST_ID,
    SequenceRow,
    TicketSession,
    seconds_left,
)
from sharded_orm.mysql_flavor import MySQLFlavor

_NO_SUCH_TABLE = 1146
_MAX_IDENTIFIER = 64
_UPDATE, _REPLACE, _BATCH = "update", "replace", "batch"


class MySQLSession(TicketSession):
    """A session on MariaDB or MySQL, which gets ids by ``UPDATE`` or ``REPLACE``.

    An id is the insert id of the statement (Flickr's method, F1). A sequence has one of two forms:

    - Form ``update`` keeps the last number in the sequence's row of the catalog table, on InnoDB.
    - Form ``replace``, which Flickr published, keeps the last number in a separate table for each
      sequence. The table needs an engine that locks whole tables: MyISAM, as at Flickr, or
      MariaDB's Aria, which also survives a crash. InnoDB is not possible: there, a REPLACE first
      takes its number, and then locks the row. So two REPLACE statements could deadlock. Between
      the two steps, an UPDATE (a request for several ids) could store a higher number. Then the
      REPLACE would overwrite it by its own lower number, and ids would be repeated.
    """

    forms = ("update", "replace")
    carries_predecessor_mark = frozenset({"update"})
    wrapper_path = "django.db.backends.mysql.base.DatabaseWrapper"

    def _limits(self, seconds: int) -> dict[str, Any]:
        # If the server stops in the middle of an answer, these time limits of the driver end the
        # wait. The driver accepts only whole seconds. So _send() has a more exact limit of its own,
        # for the wait until an answer begins.
        limits = ("connect_timeout", "read_timeout", "write_timeout")
        # Connect with utf8mb4, because the name of a sequence may contain any character.
        return {**dict.fromkeys(limits, seconds), "charset": "utf8mb4"}

    def _prepare(self) -> None:
        self._statements: dict[tuple[SequenceRow, str], bytes] = {}
        self._answers = select.poll()
        self._socket = self.connection.fileno()
        self._answers.register(self._socket, select.POLLIN)
        # No deadline applies to the two statements below, which set and read the auto_increment
        # variables. Only the time limits of the driver end them.
        cursor = self.connection.cursor()
        expected = (self.slot.step, self.slot.position)
        cursor.execute(
            "SET SESSION auto_increment_increment = %s, SESSION auto_increment_offset = %s",
            expected,
        )
        cursor.execute("SELECT @@auto_increment_increment, @@auto_increment_offset")
        actual = tuple(cursor.fetchone())
        cursor.close()
        if actual != expected:
            # The server did not keep the values that were set for the auto_increment variables. Two
            # causes are known: Galera sets these variables itself, and a proxy may send each
            # statement to another server session.
            raise TicketServerMisconfigured(
                f"Ticket server {self.alias!r} did not take auto_increment_increment and _offset:"
                f" they are {actual!r} instead of {expected!r}. Connect to one server directly,"
                " without a proxy that shares sessions, and with wsrep_auto_increment_control off."
            )

    def abandon(self) -> None:
        if self.connection is not None:
            # In a forked child, redirect the inherited socket to nowhere. Otherwise mysql_close()
            # would send COM_QUIT through the socket, which ends the parent's connection. The
            # socket's number was stored before the fork. Do not ask the driver's connection object
            # for it, because another thread of the parent may have been inside that object at the
            # fork.
            send_nowhere(self._socket)

    # ##### Handing out #####

    def take(
        self, row: SequenceRow, count: int, predecessor_mark: int, deadline: float
    ) -> Sequence[int]:
        increase = count * self.slot.step
        if row.form == "replace":
            numbers: tuple[int, ...] = () if count == 1 else (increase, LAST_ID - increase)
            kind = _REPLACE if count == 1 else _BATCH
        else:
            kind, numbers = _UPDATE, (increase, predecessor_mark, LAST_ID - increase)
        last = self._insert_id_of(self._statement(row, kind) % numbers, deadline)
        if last is None or last > LAST_ID:
            return ()
        return range(last - increase + self.slot.step, last + 1, self.slot.step)

    def _statement(self, row: SequenceRow, kind: str) -> bytes:
        """Return the SQL statement, as bytes, that takes ids of the sequence of ``row``.

        It has ``%d`` in place of each number. It is built once for each row, to save time.

        :param kind: "update" or "replace", which is the form of the sequence; or "batch", for the
            statement that takes several ids of a sequence of form "replace".
        """
        statement = self._statements.get((row, kind))
        if statement is None:
            counter = _verbatim(self._counter(row.name))
            # If the sequence's row in the catalog (the table of sequences) was changed since it was
            # checked, this condition is false, and the statement takes no id.
            unchanged = (
                f"name = {_verbatim(self._literal(row.name))} AND form = '{row.form}'"
                f" AND step = {self.slot.step:d} AND position = {self.slot.position:d}"
            )
            text = {
                _UPDATE: f"UPDATE {self.table} SET value = LAST_INSERT_ID(value + %d),"
                f" partner_mark = GREATEST(partner_mark, %d) WHERE {unchanged} AND value <= %d",
                _REPLACE: f"REPLACE INTO {counter} (stub)"
                f" SELECT 'a' FROM {self.table} WHERE {unchanged}",
                _BATCH: f"UPDATE {counter} SET id = LAST_INSERT_ID(id + %d)"
                f" WHERE id <= %d AND EXISTS (SELECT 1 FROM {self.table} WHERE {unchanged})",
            }[kind]
            statement = self._statements[(row, kind)] = text.encode()
        return statement

    def _insert_id_of(self, statement: bytes, deadline: float) -> int | None:
        """Run ``statement`` and return its insert id; None if the statement matched no row."""
        self._send_checked(statement, deadline)
        # Django connects with CLIENT.FOUND_ROWS. So affected_rows() is the number of rows that
        # match the condition, even if the statement does not change them.
        return int(self.connection.insert_id()) if self.connection.affected_rows() else None

    def _send_checked(self, statement: bytes, deadline: float) -> None:
        try:
            self._send(statement, deadline)
        except self._wrapper.Database.Error as exc:
            raise _as_operational(exc) from exc

    def _send(self, statement: bytes, deadline: float) -> None:
        left = seconds_left(deadline)
        self.connection.send_query(statement)
        if not self._answers.poll(left * 1000):
            raise OperationalError(f"no answer within {left:.3g} seconds")
        self.connection.read_query_result()

    # ##### The catalog #####

    def execute(self, sql: str, params: Sequence[Any], deadline: float) -> list[Any]:
        statement = sql % tuple(map(self._literal, params)) if params else sql
        self._send_checked(statement.encode(), deadline)
        result = self.connection.store_result()
        return list(result.fetch_row(0)) if result is not None else []

    def _literal(self, value: Any) -> str:
        return str(self.connection.literal(value).decode())

    def is_missing_table(self, exc: Exception) -> bool:
        return exc.args[:1] == (_NO_SUCH_TABLE,)

    def read(self, name: str, deadline: float) -> SequenceRow | None:
        row = super().read(name, deadline)
        if row is not None and row.form == "replace":
            self._refuse_row_locks(row, deadline)
        return row

    def _refuse_row_locks(self, row: SequenceRow, deadline: float) -> None:
        engines = self.execute(
            "SELECT engine FROM information_schema.tables"
            " WHERE table_schema = DATABASE() AND table_name = %s",
            [_counter_name(row.name)],
            deadline,
        )
        for (engine,) in engines:
            if engine not in ("Aria", "MyISAM"):
                raise TicketServerMisconfigured(
                    f"The table of sequence {row.name!r} on {self.alias!r} is of engine {engine!r}:"
                    " REPLACE beside batches can repeat ids there. Stop the clients, then run"
                    f" ALTER TABLE {self._counter(row.name)} ENGINE = Aria (MyISAM on MySQL)."
                )

    # ##### Administration #####

    def position(self, row: SequenceRow, deadline: float) -> int:
        if row.form != "replace":
            return row.value
        # Read the counter table by an UPDATE that changes nothing. The engine of the table locks
        # whole tables and lets writers go first, so a SELECT would wait until all writers pause
        # (measured: 10 seconds).
        statement = f"UPDATE {self._counter(row.name)} SET id = LAST_INSERT_ID(id)"
        self._send_checked(statement.encode(), deadline)
        # The insert id is 0 if the counter table has lost its row. Then return the value in the
        # catalog table, because no better value is known.
        return int(self.connection.insert_id()) or row.value

    def create_catalog(self, deadline: float) -> None:
        self.execute(
            f"CREATE TABLE IF NOT EXISTS {self.table} ("
            " name VARCHAR(100) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL PRIMARY KEY,"
            " form VARCHAR(10) NOT NULL, step BIGINT NOT NULL, position BIGINT NOT NULL,"
            " value BIGINT NOT NULL, partner_mark BIGINT NOT NULL) ENGINE = InnoDB",
            (),
            deadline,
        )

    def _create_counter(self, name: str, form: str, value: int, deadline: float) -> None:
        if form != "replace":
            return
        if len(_counter_name(name)) > _MAX_IDENTIFIER:
            raise InvalidSequence(
                f"Sequence {name!r} is too long for form 'replace', whose table is named after it:"
                f" {_MAX_IDENTIFIER - len(_counter_name(''))} characters at most, or form 'update'."
            )
        self.execute(
            f"CREATE TABLE IF NOT EXISTS {self._counter(name)}"
            " (id BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY,"
            " stub CHAR(1) NOT NULL UNIQUE)"
            f" ENGINE = {MySQLFlavor.of(self._wrapper).counter_engine}",
            (),
            deadline,
        )
        # The counter table needs its one row, because a request for several ids updates this row.
        # If the row exists, raise its number: another process or an interrupted run may have
        # inserted a lower one.
        self._raise_counter(name, max(value, self.slot.position), deadline)

    def _advance(self, row: SequenceRow, value: int, deadline: float) -> None:
        if row.form != "replace":
            super()._advance(row, value, deadline)
            return
        self._raise_counter(row.name, value, deadline)

    def _raise_counter(self, name: str, value: int, deadline: float) -> None:
        self.execute(
            f"INSERT INTO {_verbatim(self._counter(name))} (id, stub) VALUES (%s, 'a')"
            " ON DUPLICATE KEY UPDATE id = GREATEST(id, VALUES(id))",
            [value],
            deadline,
        )

    def durability(self, deadline: float) -> str | None:
        (row,) = self.execute(
            "SELECT @@innodb_flush_log_at_trx_commit, @@log_bin, @@sync_binlog", (), deadline
        )
        # With sync_binlog=1, each commit writes the binary log to disk. With another value, a crash
        # may lose the end of the log. After a restart, the server rolls back the transactions that
        # are not in the log, and so forgets the ids that they have taken.
        if int(row[1]) and int(row[2]) != 1:
            return (
                f"the binary log is on and sync_binlog is {row[2]}: ids that were handed out before"
                " a crash can be handed out again; set it to 1"
            )
        if int(row[0]) != 1:
            return (
                f"innodb_flush_log_at_trx_commit is {row[0]}: ids that were handed out in the last"
                " second before a crash can be handed out again; set it to 1"
            )
        return None

    def _counter(self, name: str) -> str:
        return str(self._wrapper.ops.quote_name(_counter_name(name)))


def _counter_name(name: str) -> str:
    return f"{CATALOG}_{name}"


def _verbatim(text: str) -> str:
    """Return ``text`` with each ``%`` doubled, because the statement is formatted with ``%`` later."""
    return text.replace("%", "%%")


def _as_operational(exc: Exception) -> OperationalError:
    return OperationalError(*exc.args)
