"""Many clients on thousands of schemas of two servers, through PgBouncer with four sessions each.

Shards are at two migrations, and are migrated meanwhile. Sessions are killed at random.

``TORTURE_STATEMENTS``, ``TORTURE_CLIENTS``, ``TORTURE_SCHEMAS`` and ``TORTURE_PERIOD`` in the environment
change the size, and ``TORTURE_SEED`` repeats a run. A run of more than ten minutes needs ``-o faulthandler_timeout=0``.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from tests.conftest import service_missing
from tests.integration.postgresql.clients import MIGRATIONS, Notes, Orders, run, schema_of
from tests.patience import PATIENCE
from tests.python_process import CONTEXT
from tests.services import ServiceMissing
from tests.services.pgbouncer import poolers
from tests.services.postgresql import DATABASE, PostgreSQLServer, servers

PROCESSES = 4
STATEMENTS = int(os.environ.get("TORTURE_STATEMENTS", "60000"))
CLIENTS = int(os.environ.get("TORTURE_CLIENTS", "64"))
SCHEMAS = int(os.environ.get("TORTURE_SCHEMAS", "4096"))
#: Seconds between two kills on each server.
PERIOD = float(os.environ.get("TORTURE_PERIOD", "0.2"))
_BATCH = 64
_TABLES = (
    "CREATE TABLE {0}.mark (id bigserial PRIMARY KEY, shard int NOT NULL, client int NOT NULL,"
    " number int NOT NULL, part int NOT NULL, parts int NOT NULL, seen int NOT NULL DEFAULT 0);"
    "CREATE TABLE {0}.version (migration int NOT NULL); INSERT INTO {0}.version VALUES (1);"
)


class Fleet:
    """Two servers with a PgBouncer each. The schemas are on both in turns."""

    def __init__(self, running: list[PostgreSQLServer], fronts: list[Any]) -> None:
        self.servers = running
        self.poolers = fronts

    def connect(self, node: int) -> psycopg.Connection[Any]:
        return psycopg.connect(**self.servers[node].address.psycopg(DATABASE), autocommit=True)

    def set_up(self, schemas: int) -> None:
        for node in range(len(self.servers)):
            with self.connect(node) as connection:
                connection.execute("CREATE SCHEMA IF NOT EXISTS extensions")
                for first in range(node, schemas, len(self.servers) * _BATCH):
                    for shard in range(first, schemas, len(self.servers))[:_BATCH]:
                        schema = schema_of(shard)
                        statements = f"CREATE SCHEMA {schema};" + _TABLES.format(schema)
                        if shard % 4 < 2:
                            path = f"SET LOCAL search_path TO {schema};"
                            statements += path + ";".join(MIGRATIONS[2])
                        connection.execute(statements)

    def tear_down(self, schemas: int) -> None:
        for node in range(len(self.servers)):
            with self.connect(node) as connection:
                for shard in range(node, schemas, len(self.servers)):
                    connection.execute(f"DROP SCHEMA {schema_of(shard)} CASCADE")
                connection.execute("DROP SCHEMA extensions CASCADE")

    def rows(self, schemas: int) -> Iterator[tuple[int, int, int, int, int, int]]:
        """Yield of each row the shard where it is, and what it says: shard, client, number, part, parts."""
        for node in range(len(self.servers)):
            shards = range(node, schemas, len(self.servers))
            with self.connect(node) as connection:
                for first in range(0, len(shards), _BATCH):
                    yield from connection.execute(
                        " UNION ALL ".join(
                            f"SELECT {shard}, shard, client, number, part, parts"
                            f" FROM {schema_of(shard)}.mark"
                            for shard in shards[first : first + _BATCH]
                        )
                    )

    def strays(self) -> list[str]:
        """Return the tables that are where no client may create one."""
        names: list[str] = []
        for node in range(len(self.servers)):
            with self.connect(node) as connection:
                names += [
                    name
                    for (name,) in connection.execute(
                        "SELECT oid::regclass::text FROM pg_class WHERE relname LIKE 'stray%'"
                    )
                ]
        return names


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with ExitStack() as stack:
        try:
            running = stack.enter_context(servers(2))
            fronts = stack.enter_context(poolers([server.address for server in running]))
        except ServiceMissing as exc:
            service_missing(exc)
        yield Fleet(running, fronts)


@contextmanager
def killing(fleet: Fleet, seed: int, kills: list[str]) -> Iterator[None]:
    """Terminate sessions and cancel statements at random while the ``with`` block runs."""
    is_over = threading.Event()

    def kill(node: int) -> None:
        chance = random.Random(f"{seed} {node}")
        with fleet.connect(node) as admin:
            while not is_over.wait(PERIOD):
                sessions = admin.execute(
                    "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
                    " AND pid <> pg_backend_pid()"
                ).fetchall()
                if sessions:
                    how = chance.choice(["pg_terminate_backend", "pg_cancel_backend"])
                    admin.execute(f"SELECT {how}(%s)", chance.choice(sessions))
                    kills.append(how)

    threads = [threading.Thread(target=kill, args=(node,)) for node in range(len(fleet.servers))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def torture(fleet: Fleet, statements: int, clients: int, schemas: int, flaw: str = "") -> Notes:
    """Run it, compare what the servers have with what the clients were told, and return all notes."""
    seed = int(os.environ.get("TORTURE_SEED", secrets.randbelow(10**6)))
    print(f"TORTURE_SEED={seed}")
    fleet.set_up(schemas)
    defaults = {"CONN_MAX_AGE": None, "OPTIONS": {}}
    orders = Orders(
        [pooler.address.node(**defaults) for pooler in fleet.poolers],
        [server.address.node(**defaults) for server in fleet.servers],
        schemas, (), statements // clients, seed, flaw,
    )  # fmt: skip
    answers = CONTEXT.Queue()
    processes = [
        CONTEXT.Process(
            target=run,
            args=(replace(orders, clients=range(number, clients, PROCESSES)), answers),
            daemon=True,
        )
        for number in range(PROCESSES)
    ]
    notes, kills = Notes(), list[str]()
    with killing(fleet, seed, kills):
        for process in processes:
            process.start()
        for _ in processes:
            # The rate of the slowest machine that tests run on.
            notes.add(answers.get(timeout=PATIENCE + statements / 100))
    for process in processes:
        process.join(PATIENCE)
    found: dict[tuple[int, int, int], list[int]] = {}
    rows = 0
    for place, shard, client, number, part, parts in fleet.rows(schemas):
        rows += 1
        if place != shard:
            notes.wrong.append(f"a row of {shard} is on {place}")
        found.setdefault((shard, client, number), [parts]).append(part)
    for key, (parts, *present) in found.items():
        if sorted(present) != [*range(1, parts + 1)]:
            notes.wrong.append(f"{key} has {present} of {parts}")
    notes.wrong += [f"{key} is lost" for key in notes.committed - found.keys()]
    notes.wrong += [f"{key} was rolled back" for key in notes.rolled_back & found.keys()]
    notes.wrong += [f"{name} was created" for name in fleet.strays()]
    fleet.tear_down(schemas)
    print(
        f"{notes.statements:,} statements of {clients} clients on {schemas} schemas,"
        f" {len(notes.committed):,} transactions acknowledged, {rows:,} rows, {len(kills)} kills;"
        f" {dict(sorted(notes.outcomes.items()))}; wrong: {len(notes.wrong)}"
    )
    return notes


@pytest.mark.long
def test_many_clients_on_thousands_of_schemas(fleet: Fleet) -> None:
    notes = torture(fleet, STATEMENTS, CLIENTS, SCHEMAS)
    assert notes.wrong == []
    assert notes.statements >= STATEMENTS // CLIENTS * CLIENTS
    outcomes = notes.outcomes
    assert all(
        outcomes[name] for name in ("read", "write", "update", "transact", "miss", "migrate")
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("flaw", "complaint"),
    [("path", r"(read|updated|is) on \d+$"), ("guard", "has no schema, and got a table")],
)
def test_a_removed_safeguard_is_noticed(fleet: Fleet, flaw: str, complaint: str) -> None:
    """The counter-test: with search paths of sessions, or without the guard for missing schemas."""
    notes = torture(fleet, 6000, 16, 64, flaw)
    assert any(re.search(complaint, text) for text in notes.wrong), notes.wrong[:5]
