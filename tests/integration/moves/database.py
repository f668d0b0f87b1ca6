"""A schema on SQLite, MariaDB or PostgreSQL, with sessions like an application's."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.db import Error
from django.db.utils import load_backend

from sharded_orm.backends.change_capture import CapturedTable, ChangeCapture
from sharded_orm.backends.fence_messages import is_refusal
from sharded_orm.backends.row_access import Row, RowDigests
from sharded_orm.backends.row_copy import COPY, RowCopy
from sharded_orm.topology.aliases import complete


class Database:
    """One schema, and sessions that work there like an application's."""

    def __init__(self, settings: dict[str, Any], isolation: str = "") -> None:
        self._settings = settings
        self._sessions: list[Any] = []
        self.isolation = isolation

    def session(self) -> Any:
        settings = complete(self._settings)
        wrapper = load_backend(settings["ENGINE"]).DatabaseWrapper(settings, "captured")
        wrapper.inc_thread_sharing()
        self._sessions.append(wrapper)
        return wrapper

    def capture(self) -> ChangeCapture:
        capture: ChangeCapture = self.session().change_capture()
        capture._connection.inc_thread_sharing()
        self._sessions.append(capture._connection)
        return capture

    def copy(self) -> RowCopy:
        copy: RowCopy = self.session().row_copy()
        copy._connection.inc_thread_sharing()
        self._sessions.append(copy._connection)
        return copy

    def close(self) -> None:
        for session in self._sessions:
            session.close()


def run(session: Any, sql: str, *params: Any) -> list[tuple[Any, ...]]:
    with session.cursor() as cursor:
        cursor.execute(sql, params or None)
        return list(cursor.fetchall()) if cursor.description else []


def copy_digests(copy: RowCopy, table: CapturedTable, number: int) -> RowDigests:
    """The number and the digest of the rows that one copy has in the side table."""
    return copy._digests(table, copy._side(table), f"{copy._quote(COPY)} = %s", [number])


def copy_rows(copy: RowCopy, table: CapturedTable, number: int) -> dict[Row, str]:
    """The same for each row by its primary key."""
    return copy._row_digests(table, copy._side(table), f"{copy._quote(COPY)} = %s", [number])


def refuses(session: Any, sql: str) -> bool:
    """Whether the fence refuses the statement. The session's alias is no shard, so nobody translates."""
    with pytest.raises(Error) as caught:
        run(session, sql)
    assert caught.value.__cause__ is not None
    return is_refusal(caught.value.__cause__)


def database_fixture(schema: Sequence[str], backends: Sequence[str]) -> Any:
    """Return a fixture: on each of the backends, a database with the tables of ``schema``."""

    @pytest.fixture(params=backends)
    def database(
        request: pytest.FixtureRequest, tmp_path: Path, django_db_blocker: Any
    ) -> Iterator[Database]:
        path = tmp_path / "shard.sqlite3"
        with (
            django_db_blocker.unblock(),
            database_on(request.param, request, path, schema) as database,
        ):
            yield database

    return database


def sessions_fixture(make: Callable[[Database], Any], number: int) -> Any:
    """Return a fixture: sessions of other programs on the server of the fixture ``database``.

    :param make: makes a session, whose ``driver`` is the connection of the driver.
    """

    @pytest.fixture
    def sessions(database: Database) -> Iterator[list[Any]]:
        sessions = [make(database) for _ in range(number)]
        yield sessions
        for session in sessions:
            session.driver.close()

    return sessions


@contextmanager
def database_on(
    backend: str, request: pytest.FixtureRequest, path: Path, schema: Sequence[str]
) -> Iterator[Database]:
    """A database with the tables of ``schema``.

    :param backend: "sqlite", the isolation level of sessions on MariaDB, or "postgresql" and that of
        sessions there.
    """
    if backend.startswith("postgresql "):
        with _on_postgresql(backend.removeprefix("postgresql "), request, schema) as database:
            yield database
        return
    if backend == "sqlite":
        settings: dict[str, Any] = {
            "ENGINE": "sharded_orm.backends.sqlite3",
            "NAME": str(path),
            "OPTIONS": {"timeout": 0.1},
        }
        database = Database(settings)
        setup = database.session()
        for statement in schema:
            run(setup, statement.format(id="INTEGER PRIMARY KEY AUTOINCREMENT"))
        yield database
        database.close()
        return
    import MySQLdb

    address = request.getfixturevalue("mariadb")
    name = f"capture_{secrets.token_hex(4)}"
    admin = MySQLdb.connect(**address.mysqldb(), autocommit=True)
    cursor = admin.cursor()
    cursor.execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
    settings = {
        "ENGINE": "sharded_orm.backends.mysql",
        "NAME": name,
        "OPTIONS": {"charset": "utf8mb4", "isolation_level": backend},
        **address.django(),
    }
    database = Database(settings, backend)
    setup = database.session()
    for statement in schema:
        run(setup, statement.format(id="BIGINT AUTO_INCREMENT PRIMARY KEY"))
    try:
        yield database
    finally:
        database.close()
        cursor.execute(f"DROP DATABASE {name}")
        admin.close()


@contextmanager
def _on_postgresql(
    isolation: str, request: pytest.FixtureRequest, schema: Sequence[str]
) -> Iterator[Database]:
    import psycopg

    address = request.getfixturevalue("postgresql")
    name = f"capture_{secrets.token_hex(4)}"
    level = isolation.replace(" ", r"\ ")
    settings = {
        "ENGINE": "sharded_orm.backends.postgresql",
        "NAME": "postgres",
        "SCHEMA": name,
        "OPTIONS": {"options": f"-c default_transaction_isolation={level}"},
        **address.django(),
    }
    with psycopg.connect(**address.psycopg(), autocommit=True) as admin:
        admin.execute(f"CREATE SCHEMA {name}".encode())
        database = Database(settings, isolation)
        setup = database.session()
        for statement in schema:
            # The ids that tests give are below those that the server gives.
            identity = "BIGINT GENERATED BY DEFAULT AS IDENTITY (START 100) PRIMARY KEY"
            run(setup, statement.format(id=identity))
        try:
            yield database
        finally:
            database.close()
            admin.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE".encode())
