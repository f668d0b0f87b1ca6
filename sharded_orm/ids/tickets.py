"""Ids from a pair of ticket servers (Flickr, F1-F5): odd from one, even from the other."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import request_finished, request_started
from django.db import DatabaseError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from sharded_orm.exceptions import TicketError, TicketServersUnavailable
from sharded_orm.ids.base import IdGenerator

TABLE = "sharded_orm_ticket"
LAST_ID = 2**63 - 1


class TicketGenerator(IdGenerator):
    """Round robin over the servers, step = number of servers, offset = place in the list.

    :param aliases: ``SHARDED_ORM["TICKETS"]``, in an order that never changes.

    A request is one statement in autocommit on a connection of its own, so that the
    caller's transaction neither holds the sequence's row nor takes ids back. When a
    server does not answer the next one serves; :exc:`TicketServersUnavailable` names
    the causes when none does. A sequence begins at its first use.
    """

    def __init__(self, aliases: Sequence[str]) -> None:
        self._aliases = tuple(aliases)
        self._turn = itertools.count()
        self._own = threading.local()
        request_started.connect(self._close_obsolete)
        request_finished.connect(self._close_obsolete)

    def take(self, sequence: str, count: int) -> range:
        if not isinstance(count, int) or count < 1:
            raise TicketError(f"Cannot take {count!r} ids of {sequence!r}; take at least one.")
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
            if last > LAST_ID:
                raise TicketError(f"Sequence {sequence!r} on {alias!r} is exhausted at {last!r}.")
            return range(last - (count - 1) * step, last + 1, step)
        raise TicketServersUnavailable(sequence, causes) from next(iter(causes.values()))

    def _advance(self, alias: str, sequence: str, by: int, start: int) -> int:
        """Move the sequence forward by ``by`` and return where it stands now."""
        connection = self._connection(alias)
        table = connection.ops.quote_name(TABLE)
        with connection.cursor() as cursor:
            if connection.vendor == "mysql":
                # LAST_INSERT_ID(expr) makes the new value this session's insert id, so
                # it comes back with the statement's own answer: one round trip.
                cursor.execute(
                    f"UPDATE {table} SET value = LAST_INSERT_ID(value + %s) WHERE name = %s",
                    [by, sequence],
                )
                if cursor.rowcount:
                    return int(cursor.lastrowid)
            else:
                cursor.execute(
                    f"UPDATE {table} SET value = value + %s WHERE name = %s RETURNING value",
                    [by, sequence],
                )
                if (row := cursor.fetchone()) is not None:
                    return int(row[0])
            ignore = connection.ops.insert_statement(on_conflict=_ignore())
            cursor.execute(
                f"{ignore} {table} (name, value) VALUES (%s, %s)"
                + connection.ops.on_conflict_suffix_sql([], _ignore(), [], []),
                [sequence, start],
            )
        return self._advance(alias, sequence, by, start)

    def _connection(self, alias: str) -> BaseDatabaseWrapper:
        own: dict[str, Any] = self._own.__dict__.setdefault("connections", {})
        settings = connections.settings[alias]
        connection = own.get(alias)
        if connection is None or connection.settings_dict["NAME"] != settings["NAME"]:
            connection = own[alias] = connections.create_connection(alias)
        return connection

    def _close_obsolete(self, **kwargs: Any) -> None:
        for connection in self._own.__dict__.get("connections", {}).values():
            connection.close_if_unusable_or_obsolete()


def _ignore() -> Any:
    from django.db.models.constants import OnConflict

    return OnConflict.IGNORE
