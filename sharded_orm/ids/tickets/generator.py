"""Ids from a pair of ticket servers (Flickr, F1-F5): odd from one, even from the other."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.constants import OnConflict

from sharded_orm.autonomous import AutonomousConnections
from sharded_orm.exceptions import TicketError, TicketServersUnavailable
from sharded_orm.ids.base import IdGenerator

TABLE = "sharded_orm_ticket"
LAST_ID = 2**63 - 1
# Of the table's column. MySQL would cut a longer one off, then not find it again.
MAX_NAME = 100


class TicketGenerator(IdGenerator):
    """Round robin over the servers, step = number of servers, offset = place in the list.

    :param aliases: ``SHARDED_ORM["TICKETS"]``, in an order that never changes.

    A request is one autonomous statement: the caller's transaction neither holds the
    sequence's row nor takes ids back. When a
    server does not answer the next one serves; :exc:`TicketServersUnavailable` names
    the causes when none does. A sequence begins at its first use.
    """

    def __init__(self, aliases: Sequence[str]) -> None:
        self._aliases = tuple(aliases)
        self._turn = itertools.count()
        self._connections = AutonomousConnections()
        self._one_writer = threading.Lock()

    def take(self, sequence: str, count: int) -> range:
        if not isinstance(count, int) or count < 1:
            raise TicketError(f"Cannot take {count!r} ids of {sequence!r}; take at least one.")
        if len(sequence) > MAX_NAME:
            raise TicketError(
                f"The name of a sequence has {MAX_NAME} characters at most: {sequence!r}."
            )
        step = len(self._aliases)
        if not step:
            raise ImproperlyConfigured(
                "SHARDED_ORM['TICKETS'] names no ticket server; list the aliases of the pair."
            )
        first_turn = next(self._turn)
        causes: dict[str, BaseException] = {}
        for turn in range(first_turn, first_turn + step):
            offset = turn % step
            alias = self._aliases[offset]
            try:
                last = self._advance(alias, sequence, count * step, offset + 1 - step)
            except DatabaseError as exc:
                causes[alias] = exc
                continue
            if (last - offset - 1) % step:
                raise TicketError(
                    f"Sequence {sequence!r} on {alias!r} stands at {last!r}, which is no number of"
                    f" server {offset!r} of {step!r}: another server may hand out the same ids. Put"
                    " SHARDED_ORM['TICKETS'] back into the order and number in which ids began."
                )
            return range(last - (count - 1) * step, last + 1, step)
        raise TicketServersUnavailable(sequence, causes) from next(iter(causes.values()))

    def _advance(self, alias: str, sequence: str, by: int, start: int) -> int:
        """Move the sequence forward by ``by`` and return where it stands now."""
        connection = self._connections.get(alias).connection
        # SQLite has one writer at a time anyway, and threads that share an in-memory
        # database (tests) are refused at once instead of waiting.
        with self._one_writer if connection.vendor == "sqlite" else nullcontext():
            return self._advance_on(connection, sequence, by, start)

    def _advance_on(
        self, connection: BaseDatabaseWrapper, sequence: str, by: int, start: int
    ) -> int:
        table = connection.ops.quote_name(TABLE)
        with connection.cursor() as cursor:
            # The bound keeps the last id below 2**63: beyond it MySQL without strict mode
            # would repeat the last value, and SQLite turn to floating point.
            where = "WHERE name = %s AND value <= %s"
            values: list[int | str] = [by, sequence, LAST_ID - by]
            if connection.vendor == "mysql":
                # LAST_INSERT_ID(expr) makes the new value this session's insert id, so
                # it comes back with the statement's own answer: one round trip.
                cursor.execute(
                    f"UPDATE {table} SET value = LAST_INSERT_ID(value + %s) {where}", values
                )
                if cursor.rowcount:
                    return int(cursor.lastrowid)
            else:
                cursor.execute(
                    f"UPDATE {table} SET value = value + %s {where} RETURNING value", values
                )
                if (row := cursor.fetchone()) is not None:
                    return int(row[0])
            insert = connection.ops.insert_statement(on_conflict=OnConflict.IGNORE)
            suffix = connection.ops.on_conflict_suffix_sql([], OnConflict.IGNORE, [], [])
            cursor.execute(
                f"{insert} {table} (name, value) VALUES (%s, %s) {suffix}", [sequence, start]
            )
            begun = cursor.rowcount > 0
            if not begun and self._is_exhausted(cursor, table, sequence, by):
                raise TicketError(
                    f"Sequence {sequence!r} on {connection.alias!r} is exhausted: fewer than {by!r}"
                    f" numbers are left below {LAST_ID!r}. Continue with a new sequence."
                )
        return self._advance_on(connection, sequence, by, start)

    def _is_exhausted(self, cursor: Any, table: str, sequence: str, by: int) -> bool:
        # Another process may have begun the sequence between the two statements.
        cursor.execute(
            f"SELECT 1 FROM {table} WHERE name = %s AND value > %s", [sequence, LAST_ID - by]
        )
        return cursor.fetchone() is not None
