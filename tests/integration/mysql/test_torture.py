"""Threads, shards, nested transactions, pending results and killed sessions, all at once.

Every row carries the number of the shard it was written to. Whatever happens, a row is never
found on another shard, a transaction is stored completely or not at all, and no transaction that
was reported as committed is missing.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
import time
import traceback
from collections import Counter
from typing import Any

import MySQLdb
import pytest
from django.db import Error, connections, transaction
from django.db.transaction import TransactionManagementError
from MySQLdb import cursors

from sharded_orm.backends.mysql.node import NodePool
from tests.integration.mysql.conftest import COUNT, Node
from tests.patience import PATIENCE, is_time_left

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
        self.lost = False

    def has_done_enough(self) -> bool:
        return min(self.outcomes["nested"], self.outcomes["write"]) >= LEAST

    def run(self, deadline: float) -> None:
        actions = [self.read, self.read, self.write, self.many, self.nested, self.nested,
                   self.stream, self.state, self.ddl, self.fail]  # fmt: skip
        try:
            # The kills end at the deadline, so all workers get on then.
            while is_time_left(deadline, self.has_done_enough()):
                action = self.random.choice(actions)
                try:
                    action()
                except (Error, TransactionManagementError, MySQLdb.Error) as exc:
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
        with transaction.atomic(using=f"t_{shard}"), self.node[shard].cursor() as cursor:
            cursor.executemany(INSERT, [[shard, name, part, 5] for part in range(5)])
        self.committed.add((shard, name))

    def nested(self) -> None:
        """Transactions of two or three shards inside each other, with savepoints."""
        shards = self.random.sample(range(COUNT), self.random.choice([1, 2, 3]))
        names = {shard: self.name() for shard in shards}
        done: list[int] = []
        self.enter(shards, names, done)

    def enter(self, shards: list[int], names: dict[int, str], done: list[int]) -> None:
        if not shards:
            return
        shard, *others = shards
        name = names[shard]
        give_up = self.random.random() < 0.2
        try:
            with transaction.atomic(using=f"t_{shard}"):
                self.node.run(shard, INSERT, [shard, name, 1, 2])
                try:
                    with transaction.atomic(using=f"t_{shard}"):
                        if self.random.random() < 0.7:
                            self.node.run(shard, INSERT, [shard, name, 99, 2])
                        raise Expected
                except Expected:
                    pass
                self.enter(others, names, done)
                self.read()
                with transaction.atomic(using=f"t_{shard}"):
                    self.node.run(shard, INSERT, [shard, name, 2, 2])
                if give_up:
                    raise Expected
        except Expected:
            self.rolled_back.add((shard, name))
        else:
            self.committed.add((shard, name))

    def stream(self) -> None:
        shard = self.shard()
        self.node[shard].ensure_connection()
        cursor = self.node[shard].connection.cursor(cursors.SSCursor)
        cursor.execute("SELECT shard FROM mark LIMIT 50")
        for _ in range(self.random.randrange(5)):
            row = cursor.fetchone()
            self.read()
            if row not in (None, (shard,)):
                self.wrong.append(f"{row} streamed from {shard}")
        if self.random.random() < 0.7:
            cursor.close()

    def state(self) -> None:
        shard, other = self.shard(), self.shard()
        statements = [
            "SET @mark = 1",
            f"USE t_{other}",
            f"SELECT 1; USE t_{other}",
            "BEGIN",
            "SET foreign_key_checks = 0",
            "SET autocommit = 0",
        ]
        try:
            self.node.run(shard, self.random.choice(statements))
            for number in range(COUNT):
                if number != shard:
                    self.check(number)
        finally:
            # Its own doing is the owner's until then: USE as well.
            connections[f"t_{shard}"].close()

    def ddl(self) -> None:
        shard = self.shard()
        with transaction.atomic(using=f"t_{shard}"):
            self.node.run(shard, f"CREATE TABLE made_{self.number} (id INT)")
            self.node.run(shard, f"DROP TABLE made_{self.number}")
            self.check(shard)

    def fail(self) -> None:
        shard = self.shard()
        self.node.run(shard, self.random.choice(["SELECT * FROM missing", "SELEKT", "SELECT %s"]))


def killer(node: Node, seed: int, deadline: float) -> None:
    """Kill sessions of the pool at random.

    It does not kill their statements: between two statements of a packet MariaDB does not answer
    after KILL QUERY, and the thread would wait for ever (docs/decisions/0005-one-packet.md).
    """
    chance = random.Random(seed)
    with MySQLdb.connect(**node.address.mysqldb(), autocommit=True) as admin:
        cursor = admin.cursor()
        while time.monotonic() < deadline:
            # The ids come from the server: querying the driver about a session that another thread
            # uses is an error for either of the two.
            cursor.execute(
                "SELECT id FROM information_schema.processlist WHERE db IN %s", [node.aliases]
            )
            sessions = [row[0] for row in cursor.fetchall()]
            if sessions:
                # The session was closed meanwhile, or has ended by itself.
                with contextlib.suppress(MySQLdb.Error):
                    cursor.execute(f"KILL {chance.choice(sessions)}")
            time.sleep(0.02)  # the rate of the kills


def stack(thread: threading.Thread) -> str:
    """Return where the thread is now."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "ended"


def leased(pool: NodePool) -> list[str]:
    """Describe the sessions that are leased, and what refers to them."""
    suspects = [session for session in pool._open_sessions() if session not in pool._idle]
    for session in suspects:
        # These references would keep the connection alive that has to give the session back.
        session.last_user = session.inserter = None
    if suspects:
        gc.collect()  # Connections and cursors that nobody can reach give their sessions back.
    return [
        f"{session.schema=} {session.stored=}"
        f" {[repr(referrer)[:300] for referrer in gc.get_referrers(session)]}"
        for session in suspects
        if not session.retired and session not in pool._idle
    ]


@pytest.mark.parametrize("kills", [False, True])
def test_no_row_lands_on_a_wrong_shard(
    node: Node, kills: bool, pytestconfig: pytest.Config
) -> None:
    long = pytestconfig.getoption("--long")
    seed = random.randrange(10**6) if long else 2
    seconds = 60 if long else 4
    for number in range(COUNT):
        node.ask(
            f"CREATE TABLE t_{number}.mark (id BIGINT PRIMARY KEY AUTO_INCREMENT, shard INT,"
            " transaction VARCHAR(40), part INT, parts INT, KEY (transaction)) ENGINE=InnoDB"
        )
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
        assert not thread.is_alive(), stack(thread)

    assert [worker.wrong for worker in workers if worker.wrong] == [], seed
    assert leased(node.pool) == []
    for session in node.pool._idle[:]:
        if not session.poll(0):
            assert session.fetch_one(b"SELECT @@in_transaction, @@autocommit") == (0, 1)
            session.drain()
    found: dict[tuple[int, str], list[int]] = {}
    for number in range(COUNT):
        for shard, name, part, parts in node.ask(
            f"SELECT shard, transaction, part, parts FROM t_{number}.mark"
        ):
            assert shard == number, seed
            found.setdefault((shard, name), [parts]).append(part)
    for key, (parts, *present) in found.items():
        assert len(present) == parts, (seed, key, present)
        assert 99 not in present, (seed, key)
    for worker in workers:
        assert worker.committed <= found.keys(), seed
        assert not worker.rolled_back & found.keys(), seed
    outcomes = sum((worker.outcomes for worker in workers), Counter[str]())
    assert outcomes["nested"] > 20, outcomes
