"""Ticket servers of these tests, and the faults that they can have."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Self

from django.db.utils import ConnectionHandler

from sharded_orm.ids.tickets.session import (
    CATALOG,
    SequenceRow,
    SequenceSlot,
    TicketSession,
    session_class,
)
from tests.integration.tickets.faults.workload import Workload
from tests.patience import PATIENCE
from tests.services.mariadb import MariaDBServer
from tests.services.postgresql import PostgreSQLServer
from tests.services.proxy import Proxy

DATABASE = "tickets"


class TicketDatabase:
    """A ticket server from its administrator's view, without a generator."""

    def __init__(self, vendor: str, settings: dict[str, Any], place: SequenceSlot) -> None:
        self.alias = f"tickets_{place.position}"
        self._class, self._place = session_class(vendor), place
        # Completes the settings as Django does.
        self._settings = ConnectionHandler({"default": {}, self.alias: settings}).settings

    @contextlib.contextmanager
    def session(self) -> Iterator[TicketSession]:
        session = self._class(self.alias, self._settings[self.alias], self._place, PATIENCE)
        try:
            yield session
        finally:
            session.close()

    def create(self, sequence: str, form: str | None = None) -> None:
        with self.session() as session:
            session.create_catalog(_deadline())
            session.create(sequence, form or session.forms[0], 0, _deadline())

    def position(self, sequence: str) -> int:
        """Return the last id that the sequence has handed out."""
        with self.session() as session:
            return session.position(_row(session, sequence), _deadline())

    def partner_mark(self, sequence: str) -> int:
        with self.session() as session:
            return _row(session, sequence).predecessor_mark


def _deadline() -> float:
    return time.monotonic() + PATIENCE


def _row(session: TicketSession, sequence: str) -> SequenceRow:
    row = session.read(sequence, _deadline())
    assert row is not None
    return row


class ServerTickets(TicketDatabase):
    """On a private server, which its clients reach through a proxy."""

    vendor: ClassVar[str]
    faults = ("killed", "paused", "cut", "stalled", "silenced", "locked")

    def __init__(self, server: MariaDBServer | PostgreSQLServer, place: SequenceSlot) -> None:
        self.server = server
        self.proxy = Proxy(server.address.host, server.address.port)
        settings = {
            "ENGINE": f"django.db.backends.{self.vendor}",
            "NAME": DATABASE,
            **server.address.django(),
        }
        #: An entry of ``DATABASES``.
        self.for_clients = {**settings, "HOST": self.proxy.host, "PORT": self.proxy.port}
        super().__init__(self.vendor, settings, place)
        self.execute(f"CREATE DATABASE {DATABASE}")

    @abstractmethod
    def connection(self) -> AbstractContextManager[Any]:
        """The administrator's connection, in autocommit."""

    def execute(self, sql: str) -> None:
        with self.connection() as connection:
            connection.cursor().execute(sql)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.proxy.close()

    # ##### Its data #####

    def back_up(self, folder: Path) -> None:
        """Copy the data folder while the server is stopped."""
        self.server.stop()
        shutil.copytree(self.server.folder / "data", folder)
        self.server.start()

    def put_back(self, folder: Path) -> None:
        """Restart the server with the data of a copy."""
        self.server.stop()
        shutil.rmtree(self.server.folder / "data")
        shutil.copytree(folder, self.server.folder / "data")
        self.server.start()

    # ##### Faults: each lasts as long as its block #####

    @contextlib.contextmanager
    def killed(self) -> Iterator[None]:
        self.server.kill()
        try:
            yield
        finally:
            self.server.start()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.server.pause()
        try:
            yield
        finally:
            self.server.resume()

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Connections are reset, new ones refused."""
        self.proxy.cut()
        try:
            yield
        finally:
            self.proxy.forward()

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """Connections are accepted, and nothing comes through."""
        self.proxy.stall()
        try:
            yield
        finally:
            self.proxy.forward()

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """The server counts, but its answers are lost."""
        self.proxy.drop_answers()
        try:
            yield
        finally:
            self.proxy.forward()

    @abstractmethod
    def locked(self) -> AbstractContextManager[None]:
        """Requests wait for a lock in the server, and run when the block ends."""


class MariaDBTickets(ServerTickets):
    """On MariaDB."""

    vendor = "mysql"

    def connection(self) -> AbstractContextManager[Any]:
        import MySQLdb

        return contextlib.closing(MySQLdb.connect(**self.server.address.mysqldb(), autocommit=True))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        with self.connection() as connection:
            # As a backup does.
            connection.cursor().execute("FLUSH TABLES WITH READ LOCK")
            yield


class PostgreSQLTickets(ServerTickets):
    """On PostgreSQL."""

    vendor = "postgresql"

    def connection(self, database: str = "postgres") -> AbstractContextManager[Any]:
        import psycopg

        to = {**self.server.address.psycopg(), "dbname": database}
        return contextlib.closing(psycopg.connect(**to, autocommit=True))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        with self.connection(DATABASE) as connection:
            # As VACUUM FULL does, and many an ALTER TABLE.
            connection.execute(f"BEGIN; LOCK TABLE {CATALOG} IN ACCESS EXCLUSIVE MODE")
            yield


class SQLiteTickets(TicketDatabase):
    """In a file."""

    def __init__(self, path: Path, place: SequenceSlot) -> None:
        self.path = path
        #: An entry of ``DATABASES``.
        self.for_clients = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path)}
        super().__init__("sqlite", self.for_clients, place)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Another transaction holds the write lock of the file."""
        with contextlib.closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield


def all_serve(workload: Workload, servers: Sequence[TicketDatabase], sequence: str) -> None:
    """Wait until each process has a new id of each server."""
    for place, server in enumerate(servers):
        workload.wait_for_ids_above(place, server.position(sequence), all)


def suffer(
    workload: Workload, servers: Sequence[TicketDatabase], place: int, fault: str, sequence: str
) -> None:
    """Run one fault of one server until the processes use the recovered server."""
    server, partner = servers[place], servers[1 - place]
    with getattr(server, fault)():
        # Between two requests to the partner, each process has asked this server, or has given up
        # on it before.
        for _ in range(2):
            workload.wait_for_ids_above(1 - place, partner.position(sequence), all)
    # Not all of them: the next fault may come while some still avoid this server.
    workload.wait_for_ids_above(place, server.position(sequence), any)
    # A call that has already given up on this server must not meet the fault of the other one.
    workload.wait_for_new_calls()
