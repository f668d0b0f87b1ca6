"""Sessions on PostgreSQL, and queries that the tests send."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from django.db.utils import ConnectionHandler

from sharded_orm.ids.tickets.session import SequenceRow, SequenceSlot, session_class
from tests.services.postgresql import Address

ONE, TWO = SequenceSlot(1, 2), SequenceSlot(2, 2)
numbers = itertools.count(1)
Opener = Callable[..., Any]


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def connect(postgresql: Address, django_db_blocker: Any) -> Iterator[Opener]:
    """Return a function that opens sessions; they are closed after the test."""
    opened = []

    def open_session(
        place: SequenceSlot = ONE, address: Address = postgresql, **options: Any
    ) -> Any:
        settings = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": "postgres",
            "OPTIONS": options,
            **address.django(),
        }
        complete = ConnectionHandler({"default": {}, "tickets": settings}).settings["tickets"]
        session = session_class("postgresql")("tickets", complete, place, 2.0)
        opened.append(session)
        return session

    with django_db_blocker.unblock():
        yield open_session
    for session in opened:
        session.close()


@pytest.fixture
def session(connect: Opener) -> Any:
    session = connect()
    session.create_catalog(soon())
    return session


@pytest.fixture
def row(session: Any) -> SequenceRow:
    """A new sequence of the first of two servers."""
    return begin(session)


def begin(session: Any, value: int = 0) -> SequenceRow:
    row: SequenceRow = session.create(f"sequence {next(numbers)}", "sequence", value, soon())
    return row


def take(session: Any, row: SequenceRow, count: int = 1) -> Sequence[int]:
    ids: Sequence[int] = session.take(row, count, 0, soon())
    return ids


def counter(row: SequenceRow) -> str:
    return f'"sharded_orm_sequence_{row.name}"'


def run(session: Any, sql: str, *params: Any) -> list[Any]:
    rows: list[Any] = session.execute(sql, params, soon())
    return rows
