"""What it costs to close a session of PostgreSQL after it has used many schemas, and what it saves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from django.db import connections

from tests.benchmarks.report import Line, at_most
from tests.benchmarks.site import Site
from tests.benchmarks.timing import Rounds, compare
from tests.services import postgresql

SCHEMAS, TABLES = 1024, 10
_NEVER = 10**9


def session_recycling(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Read from 1,024 schemas in turns: with sessions that are closed in time, and with one for all.

    ``stock`` is the session that is never closed: it has read all catalogs once, and keeps them.
    """
    with (
        postgresql.servers(1) as (server,),
        psycopg.connect(**server.address.psycopg(postgresql.DATABASE), autocommit=True) as admin,
    ):
        for number in range(SCHEMAS):
            admin.execute(
                f"CREATE SCHEMA s{number};"
                + "".join(
                    f"CREATE TABLE s{number}.t{n} (id bigint PRIMARY KEY, a int, b text);"
                    f"CREATE INDEX ON s{number}.t{n} (a); INSERT INTO s{number}.t{n} VALUES (1, 1, 'b');"
                    for n in range(TABLES)
                )
            )
        for tables, what in ((1, "one read of each schema"), (TABLES, "10 tables of each schema")):
            settings = server.address.node(OPTIONS={}, CONN_MAX_AGE=None)
            with (
                _aliases("recycled", settings) as recycled,
                _aliases("kept", settings | {"POOL": {"MAX_SCHEMAS": _NEVER}}) as kept,
            ):
                readers = _reader(recycled, tables), _reader(kept, tables)
                measured = compare(*readers, rounds, number=SCHEMAS)
                memory = [
                    _memory(aliases, read)
                    for aliases, read in zip((recycled, kept), readers, strict=True)
                ]
            yield at_most(
                2.0, f"PostgreSQL, {SCHEMAS} schemas in turns, {what}", "sessions never closed",
                measured, goal=False,
            )  # fmt: skip
            yield Line(
                f"PostgreSQL, memory of the server's process, {what}", f"{memory[1]:.0f} MB",
                f"{memory[0]:.0f} MB",
            )  # fmt: skip


@contextmanager
def _aliases(name: str, settings: dict[str, Any]) -> Iterator[list[str]]:
    aliases = [f"{name}_{number}" for number in range(SCHEMAS)]
    complete = dict(connections.settings["default"])
    for number, alias in enumerate(aliases):
        connections.settings[alias] = {**complete, **settings, "SCHEMA": f"s{number}"}
    yield aliases
    connections[aliases[0]].node_pool.dispose()
    for alias in aliases:
        connections[alias].close()
        del connections[alias], connections.settings[alias]


def _reader(aliases: list[str], tables: int) -> Callable[[], None]:
    turns = itertools.cycle(aliases)

    def read() -> None:
        with connections[next(turns)].cursor() as cursor:
            for n in range(tables):
                cursor.execute(f"SELECT id, a, b FROM t{n} WHERE a = 1")
                cursor.fetchall()

    return read


def _memory(aliases: list[str], read: Callable[[], None]) -> float:
    """Read from each schema, and return the most memory in MB that the server's process had for itself."""
    pool = connections[aliases[0]].node_pool
    largest = 0.0
    for _ in aliases:
        read()
        for session in pool._open_sessions():
            status = Path(f"/proc/{session.pgconn.backend_pid}/status").read_text()
            (line,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
            largest = max(largest, int(line.split()[1]) / 1024)
    return largest
