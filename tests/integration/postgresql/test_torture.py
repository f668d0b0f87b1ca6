"""Threads, shards, nested transactions, open cursors and killed sessions, all at once.

Every row carries the number of the shard it was written to. Whatever happens, a row is never found on
another shard, a transaction is stored completely or not at all, and no transaction that was reported
as committed is missing.
"""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from django.db import Error, connections, transaction
from django.db.transaction import TransactionManagementError

from sharded_orm.backends.postgresql import connection as connection_module
from sharded_orm.backends.postgresql.node import PostgreSQLPool
from sharded_orm.exceptions import SessionStateRefused
from tests.integration.postgresql.conftest import COUNT, Node, running
from tests.patience import PATIENCE, is_time_left
from tests.services.postgresql import Address

THREADS = 6
#: How often each thread has to write, and to nest transactions.
LEAST = 4
INSERT = "INSERT INTO mark (shard, transaction, part, parts) VALUES (%s, %s, %s, %s)"


class Expected(Exception):
    """Makes a block roll back."""


class Worker:
    def __init__(self, node: Node, number: int, seed: int) -> None:
        self.node = node
        self.random = random.Random(f"{seed} {number}")
        self.number = number
        self.counter = 0
        self.committed: set[tuple[int, str]] = set()
        self.rolled_back: set[tuple[int, str]] = set()
        self.wrong: list[str] = []
        self.outcomes: Counter[str] = Counter()

    def has_done_enough(self) -> bool:
        return min(self.outcomes["nested"], self.outcomes["write"]) >= LEAST

    def run(self, deadline: float) -> None:
        actions = [self.read, self.read, self.write, self.many, self.nested, self.nested,
                   self.chunks, self.copy, self.state, self.ddl, self.fail]  # fmt: skip
        try:
            # The kills end at the deadline, so all workers get on then.
            while is_time_left(deadline, self.has_done_enough()):
                action = self.random.choice(actions)
                try:
                    action()
                except (Error, TransactionManagementError, psycopg.Error) as exc:
                    self.outcomes[type(exc).__name__] += 1
                    for alias in self.node.aliases:
                        connections[alias].close_if_unusable_or_obsolete()
                else:
                    self.outcomes[action.__name__] += 1
        except BaseException as exc:
            self.wrong.append(f"{type(exc).__name__}: {exc}")
            raise
        finally:
            for alias in self.node.aliases:
                connections[alias].close()

    def name(self) -> str:
        self.counter += 1
        return f"{self.number}-{self.counter}"

    def shard(self) -> int:
        return self.random.randrange(COUNT)

    def check(self, shard: int) -> None:
        rows = self.node.run(shard, "SELECT DISTINCT shard FROM mark")
        if rows not in ([], [(shard,)]):
            self.wrong.append(f"{rows} read on {shard}")

    def read(self) -> None:
        self.check(self.shard())

    def write(self) -> None:
        shard = self.shard()
        name = self.name()
        self.node.run(shard, INSERT, [shard, name, 1, 1])
        self.committed.add((shard, name))

    def many(self) -> None:
        shard = self.shard()
        name = self.name()
        with self.node[shard].cursor() as cursor:
            cursor.executemany(INSERT, [[shard, name, part, 5] for part in range(5)])
        self.committed.add((shard, name))

    def copy(self) -> None:
        shard = self.shard()
        name = self.name()
        with self.node[shard].cursor() as cursor:
            with cursor.copy("COPY mark (shard, transaction, part, parts) FROM STDIN") as copy:
                for part in range(3):
                    copy.write_row([shard, name, part, 3])
        self.committed.add((shard, name))

    def nested(self) -> None:
        """Transactions of one or two shards inside each other, with savepoints."""
        # Each holds a session of the server. The pooler has few, and the threads could wait for
        # each other.
        most = 1 if self.node.pool.has_pooler else 2
        shards = self.random.sample(range(COUNT), self.random.randint(1, most))
        self.enter(shards, {shard: self.name() for shard in shards})

    def enter(self, shards: list[int], names: dict[int, str]) -> None:
        if not shards:
            return
        shard, *others = shards
        name = names[shard]
        give_up = self.random.random() < 0.2
        try:
            with transaction.atomic(using=f"t_{shard}"):
                self.node.run(shard, INSERT, [shard, name, 1, 2])
                with contextlib.suppress(Expected), transaction.atomic(using=f"t_{shard}"):
                    if self.random.random() < 0.7:
                        self.node.run(shard, INSERT, [shard, name, 99, 2])
                    raise Expected
                self.enter(others, names)
                if not others:
                    self.check(shard)
                with transaction.atomic(using=f"t_{shard}"):
                    self.node.run(shard, INSERT, [shard, name, 2, 2])
                if give_up:
                    raise Expected
        except Expected:
            self.rolled_back.add((shard, name))
        else:
            self.committed.add((shard, name))

    def chunks(self) -> None:
        shard = self.shard()
        cursor = self.node[shard].chunked_cursor()
        try:
            cursor.execute("SELECT shard FROM mark LIMIT 50")
            for _ in range(self.random.randrange(5)):
                row = cursor.fetchone()
                self.read()
                if row not in (None, (shard,)):
                    self.wrong.append(f"{row} fetched from {shard}")
        finally:
            cursor.close()

    def state(self) -> None:
        shard, other = self.shard(), self.shard()
        statements = [
            "SET work_mem = '2MB'",
            f"SET search_path TO t_{other}",
            f"SELECT 1; SET search_path TO t_{other}",
            "CREATE TEMPORARY TABLE mark (shard int DEFAULT 999)",
            "SELECT pg_try_advisory_lock(5)",
            "BEGIN",
            "SET LOCAL search_path TO nowhere",
            "ANALYZE mark",
            "VACUUM mark",
        ]
        try:
            with contextlib.suppress(SessionStateRefused):
                self.node.run(shard, self.random.choice(statements))
            for number in range(COUNT):
                if number != shard:
                    self.check(number)
        finally:
            # What it has set is the owner's until then.
            connections[f"t_{shard}"].close()

    def ddl(self) -> None:
        shard = self.shard()
        with transaction.atomic(using=f"t_{shard}"):
            self.node.run(shard, f"CREATE TABLE made_{self.number} (id int)")
            self.node.run(shard, f"DROP TABLE made_{self.number}")
            self.check(shard)

    def fail(self) -> None:
        self.node.run(
            self.shard(), self.random.choice(["SELECT * FROM missing", "SELEKT", "SELECT 1/0"])
        )


def killer(node: Node, seed: int, deadline: float) -> None:
    """Terminate sessions and cancel statements at random."""
    chance = random.Random(seed)
    with node.connect() as admin:
        mine = [admin.info.backend_pid, node.admin.info.backend_pid]
        while time.monotonic() < deadline:
            sessions = [
                pid
                for (pid,) in admin.execute(
                    "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
                    " AND pid <> ALL(%s)", [mine],
                )
            ]  # fmt: skip
            if sessions:
                how = chance.choice(["pg_terminate_backend", "pg_cancel_backend"])
                admin.execute(f"SELECT {how}(%s)", [chance.choice(sessions)])
            time.sleep(0.02)  # the rate of the kills


class RandomPool:
    """Makes a pool lease any idle session, not the one that was released last."""

    def __init__(self, pool: PostgreSQLPool, seed: int) -> None:
        self._lease = pool.lease
        self._pool = pool
        self._random = random.Random(seed)

    def lease(self) -> Any:
        with contextlib.suppress(IndexError):
            # Another thread may take sessions meanwhile.
            idle = self._pool._idle
            for _ in range(self._random.randrange(max(len(idle), 1))):
                idle.insert(0, idle.pop())
        return self._lease()


def leased(pool: PostgreSQLPool) -> list[Any]:
    """Return the sessions that are still leased."""
    suspects = [session for session in pool._open_sessions() if session not in pool._idle]
    if suspects:
        gc.collect()  # Connections and cursors that nobody can reach give their sessions back.
    return [s for s in suspects if not s.retired and s not in pool._idle]


def torture(node: Node, monkeypatch: pytest.MonkeyPatch, kills: bool, long: bool) -> list[str]:
    """Run it and return what was wrong."""
    seed = random.randrange(10**6) if long else 2
    seconds = 60 if long else 3
    for number in range(COUNT):
        node.ask(
            f"CREATE TABLE t_{number}.mark (id bigserial PRIMARY KEY, shard int,"
            " transaction varchar(40), part int, parts int)"
        )
        node.ask(f"CREATE INDEX ON t_{number}.mark (transaction)")
    monkeypatch.setattr(node.pool, "lease", RandomPool(node.pool, seed).lease)
    deadline = time.monotonic() + seconds
    workers = [Worker(node, number, seed) for number in range(THREADS)]
    threads: list[Any] = [
        threading.Thread(target=worker.run, args=(deadline,)) for worker in workers
    ]
    if kills:
        threads.append(threading.Thread(target=killer, args=(node, seed, deadline)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + PATIENCE)
        assert not thread.is_alive()
    wrong = [f"seed {seed}: {text}" for worker in workers for text in worker.wrong]
    found: dict[tuple[int, str], list[int]] = {}
    for number in range(COUNT):
        for shard, name, part, parts in node.ask(
            f"SELECT shard, transaction, part, parts FROM t_{number}.mark"
        ):
            if shard != number:
                wrong.append(f"a row of {shard} is on {number}")
            found.setdefault((shard, name), [parts]).append(part)
    for key, (parts, *present) in found.items():
        if len(present) != parts or 99 in present:
            wrong.append(f"{key} has {present} of {parts}")
    for worker in workers:
        wrong += [f"{key} is lost" for key in worker.committed - found.keys()]
        wrong += [f"{key} was rolled back" for key in worker.rolled_back & found.keys()]
    wrong += [f"{session} is still leased" for session in leased(node.pool)]
    outcomes = sum((worker.outcomes for worker in workers), Counter[str]())
    if outcomes["nested"] < 10 or outcomes["write"] < 10:
        wrong.append(f"too little was done: {outcomes}")
    return wrong


@pytest.fixture(params=["direct", "pooled"])
def any_node(
    request: pytest.FixtureRequest, postgresql: Address, pgbouncer: Address, django_db_blocker: Any
) -> Iterator[Node]:
    address = postgresql if request.param == "direct" else pgbouncer
    with django_db_blocker.unblock():
        yield from running(Node(address, postgresql))


@pytest.mark.parametrize("kills", [False, True])
def test_no_row_lands_on_a_wrong_shard(
    any_node: Node, kills: bool, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = pytestconfig.getoption("--long")
    assert torture(any_node, monkeypatch, kills, long) == []
    for session in any_node.pool._idle[:]:
        if not session.poll(0):
            assert session.is_idle


def test_the_torture_finds_a_path_that_stays_in_the_session(
    pooled_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counter-test: search paths are set for sessions, and only if the alias has another one."""
    begin = connection_module.PostgreSQLConnection.begin_statement
    lease = connection_module.PostgreSQLConnection.lease_session
    paths: dict[int, Any] = {}

    def unsafe(connection: Any) -> Any:
        session = lease(connection)
        connection.autocommit_prefix, connection.autocommit_packet = [], b""
        connection.set_path = None
        if paths.get(id(session)) != connection.schema:
            session.run(f"SET search_path TO {connection.schema}".encode())
            paths[id(session)] = connection.schema
        return session

    cls = connection_module.PostgreSQLConnection
    monkeypatch.setattr(cls, "lease_session", unsafe)
    assert cls.begin_statement is begin
    found = torture(pooled_node, monkeypatch, kills=False, long=False)
    assert any("read on" in text or "is on" in text for text in found)
