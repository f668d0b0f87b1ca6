"""Clients of thousands of schemas on two servers, in processes of their own, with many threads each.

Every row carries the number of its shard. A client notes what was acknowledged, and complains about a
row of another shard, and about each error that the loss of a session does not explain.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import parent_process
from typing import Any

import django
from django.conf import settings
from django.db import Error, InterfaceError, OperationalError, connections, transaction

from sharded_orm.backends.postgresql import connection as connection_module
from sharded_orm.exceptions import ShardDatabaseMissing

INSERT = "INSERT INTO mark (shard, client, number, part, parts) VALUES (%s, %s, %s, %s, %s)"
READ = "SELECT m.*, v.migration FROM version v LEFT JOIN mark m ON true ORDER BY m.id DESC LIMIT 5"
#: A shard of this many has no schema.
ABSENT_OF = 64


@dataclass(frozen=True)
class Orders:
    """What a process has to do.

    :param poolers: settings of the nodes as clients reach them.
    :param servers: settings of the same nodes, without a pooler, for migrations.
    :param clients: the numbers of its clients.
    :param statements: how many statements each client runs.
    :param flaw: a safeguard to be removed: "path" or "guard"; "" for none.
    """

    poolers: Sequence[dict[str, Any]]
    servers: Sequence[dict[str, Any]]
    schemas: int
    clients: Sequence[int]
    statements: int
    seed: int
    flaw: str = ""


@dataclass
class Notes:
    """What the clients of a process have seen."""

    statements: int = 0
    committed: set[tuple[int, int, int]] = field(default_factory=set)
    """Shard, client and number of each transaction that was acknowledged."""
    rolled_back: set[tuple[int, int, int]] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)

    def add(self, other: Notes) -> None:
        self.statements += other.statements
        self.committed |= other.committed
        self.rolled_back |= other.rolled_back
        self.wrong += other.wrong
        self.outcomes += other.outcomes


def schema_of(shard: int) -> str:
    return f"s{shard:05d}"


def run(orders: Orders, answers: Any) -> None:
    """Do what ``orders`` say, and put the :class:`Notes` of all clients into ``answers``."""
    try:
        answers.put(_run(orders))
    except BaseException as exc:
        answers.put(Notes(wrong=[f"a process has failed: {exc!r}"]))
        raise


def _run(orders: Orders) -> Notes:
    databases: dict[str, Any] = {"default": {}}
    for shard in range(orders.schemas + orders.schemas // ABSENT_OF):
        node, schema = shard % len(orders.poolers), {"SCHEMA": schema_of(shard)}
        databases[f"s{shard}"] = {**orders.poolers[node], **schema}
        databases[f"m{shard}"] = {**orders.servers[node], **schema}
    # Sessions are lost all the time.
    logging.getLogger("sharded_orm").setLevel(logging.ERROR)
    settings.configure(DATABASES=databases, USE_TZ=True)
    django.setup()
    _remove(orders.flaw)
    workers = [Client(orders, number) for number in orders.clients]
    threads = [threading.Thread(target=worker.work) for worker in workers]
    migrator = Migrator(orders, min(orders.clients))
    migrating = threading.Thread(target=migrator.work)
    for thread in (*threads, migrating):
        thread.start()
    for thread in threads:
        thread.join()
    migrator.is_over.set()
    migrating.join()
    notes = migrator.notes
    for worker in workers:
        notes.add(worker.notes)
    return notes


def _remove(flaw: str) -> None:
    cls = connection_module.PostgreSQLConnection
    if flaw == "guard":
        connection_module.guard_of = lambda schema: "1"
    elif flaw == "path":
        lease = cls.lease_session
        paths: dict[int, Any] = {}

        def lease_session(connection: Any) -> Any:
            """Set search paths for sessions, and only if the session has another one."""
            session = lease(connection)
            connection.autocommit_prefix, connection.autocommit_packet = [], b""
            connection.set_path = None
            if paths.get(id(session)) != connection.schema:
                session.run(f"SET search_path TO {connection.schema}".encode())
                paths[id(session)] = connection.schema
            return session

        cls.lease_session = lease_session  # type: ignore[method-assign]


class Unexpected(Exception):
    """A client has seen what must not be."""


class Expected(Exception):
    """Makes a block roll back."""


class Worker:
    def __init__(self, orders: Orders, number: int) -> None:
        self.orders = orders
        self.number = number
        self.random = random.Random(f"{type(self).__name__} {orders.seed} {number}")
        self.notes = Notes()

    @contextmanager
    def connected(self, alias: str) -> Iterator[Any]:
        """Give the connection of ``alias``. The process does not keep thousands of them."""
        try:
            yield connections[alias]
        finally:
            connections[alias].close()
            del connections[alias]

    def guarded(self, action: Any) -> None:
        """Run ``action``. Errors that a killed session explains are counted, others are wrong."""
        try:
            action()
        except (OperationalError, InterfaceError) as exc:
            if "plan" in str(exc) or "prepared statement" in str(exc):
                self.notes.wrong.append(f"{action.__name__}: {exc!r}")
            self.notes.outcomes[type(exc.__cause__ or exc).__name__] += 1
        except (Error, Unexpected) as exc:
            self.notes.wrong.append(f"{action.__name__}: {exc!r}")
        else:
            self.notes.outcomes[action.__name__] += 1


class Client(Worker):
    counter = 0

    def work(self) -> None:
        actions = [self.read, self.read, self.read, self.write, self.update, self.transact]
        try:
            while self.notes.statements < self.orders.statements:
                # Whoever has started the process may be killed.
                parent = parent_process()
                assert parent is not None
                assert parent.is_alive()
                is_odd = self.random.random() < 0.01
                self.guarded(self.miss if is_odd else self.random.choice(actions))
        except BaseException as exc:
            self.notes.wrong.append(f"client {self.number} has died: {exc!r}")
            raise

    def execute(self, connection: Any, sql: str, params: Sequence[Any] = ()) -> list[Any]:
        self.notes.statements += 1
        with connection.cursor() as cursor:
            cursor.execute(sql, params)
            if cursor.description is None:
                return []
            names = [column.name for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def shard(self) -> int:
        return self.random.randrange(self.orders.schemas)

    def new_transaction(self, shard: int) -> tuple[int, int, int]:
        self.counter += 1
        return shard, self.number, self.counter

    def check(self, connection: Any, shard: int) -> None:
        """Read some rows: all are of the shard, and have the columns of its migration."""
        for row in self.execute(connection, READ):
            if row["shard"] not in (shard, None):
                raise Unexpected(f"{row} read on {shard}")
            if (row["migration"] == 2) != ("note" in row):
                raise Unexpected(f"{row} has not the columns of its migration")

    def read(self) -> None:
        shard = self.shard()
        with self.connected(f"s{shard}") as connection:
            for _ in range(12):
                self.check(connection, shard)

    def write(self) -> None:
        shard = self.shard()
        with self.connected(f"s{shard}") as connection:
            for _ in range(8):
                key = self.new_transaction(shard)
                self.execute(connection, INSERT, [*key, 1, 1])
                self.notes.committed.add(key)

    def update(self) -> None:
        shard = self.shard()
        update = "UPDATE mark SET seen = seen + 1 WHERE id IN (1, 2) RETURNING shard"
        with self.connected(f"s{shard}") as connection:
            for _ in range(4):
                for row in self.execute(connection, update):
                    if row["shard"] != shard:
                        raise Unexpected(f"{row} updated on {shard}")

    def transact(self) -> None:
        shard = self.shard()
        key = self.new_transaction(shard)
        alias = f"s{shard}"
        with self.connected(alias) as connection:
            try:
                with transaction.atomic(using=alias):
                    self.execute(connection, INSERT, [*key, 1, 2])
                    self.check(connection, shard)
                    with transaction.atomic(using=alias):
                        self.execute(connection, INSERT, [*key, 2, 2])
                    if self.random.random() < 0.2:
                        raise Expected
            except Expected:
                self.notes.rolled_back.add(key)
            else:
                self.notes.committed.add(key)

    def miss(self) -> None:
        """Write to a shard whose schema does not exist."""
        shard = self.orders.schemas + self.random.randrange(self.orders.schemas // ABSENT_OF)
        alias = f"s{shard}"
        with self.connected(alias) as connection:
            try:
                self.execute(connection, f"CREATE TABLE stray_{self.number} (i int)")
            except ShardDatabaseMissing:
                return
            finally:
                connection.close()
            raise Unexpected(f"{alias} has no schema, and got a table")


class Migrator(Worker):
    """Migrates shards back and forth, one after the other, as ``migrate_shards`` does."""

    def __init__(self, orders: Orders, number: int) -> None:
        super().__init__(orders, number)
        self.is_over = threading.Event()

    def work(self) -> None:
        while not self.is_over.is_set():
            self.guarded(self.migrate)
            time.sleep(0.1)  # the rate of the migrations

    def migrate(self) -> None:
        alias = f"m{self.random.randrange(self.orders.schemas)}"
        with self.connected(alias) as connection:
            if not connection.lock_schema(0):
                return
            with transaction.atomic(using=alias), connection.cursor() as cursor:
                cursor.execute("SELECT migration FROM version FOR UPDATE")
                ((migration,),) = cursor.fetchall()
                for statement in MIGRATIONS[3 - migration]:
                    cursor.execute(statement)
            connection.unlock_schema()


#: The statements that bring a shard to a migration from the other one.
MIGRATIONS = {
    1: ["ALTER TABLE mark DROP COLUMN note", "UPDATE version SET migration = 1"],
    2: [
        "ALTER TABLE mark ADD COLUMN note varchar(20) DEFAULT 'new' NOT NULL",
        "CREATE INDEX ON mark (note)",
        "UPDATE version SET migration = 2",
    ],
}
