"""A site on two servers of PostgreSQL, of which the second replicates from the first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.integration.promotion.site import SHARDS, Site
from tests.services.postgresql import DATABASE
from tests.services.streaming import (
    StreamingPair,
    StreamingServer,
    connect,
    execute,
    wait_until_equal,
)

SCHEMAS = [f"photos_{number:05d}" for number in range(SHARDS)]
STATEMENTS = [
    statement
    for schema in SCHEMAS
    for statement in (
        f"CREATE SCHEMA {schema}",
        f"CREATE TABLE {schema}.entries_entry (entry_id bigint PRIMARY KEY, user_id bigint NOT NULL)",
    )
] + ["CREATE SCHEMA photos_visits_0"]
#: What writers are told by the fence: about a session that was ended, and about a new one.
REFUSALS = ("terminating connection", "is not currently accepting connections",
            "server closed the connection", "connection is lost")  # fmt: skip


@dataclass
class PostgreSQLSite(Site):
    """Both nodes are the database ``site`` of a server."""

    pair: StreamingPair  # type: ignore[assignment]  # the same names for other servers

    def create_databases(self) -> None:
        self.pair.reset(STATEMENTS)
        self._create_default()

    def _server(self, which: str) -> StreamingServer:
        server: StreamingServer = getattr(self.pair, which)
        return server

    def execute(self, which: str, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run a statement in the database ``postgres``, which is always open."""
        return execute(self._server(which), sql, parameters, database="postgres")

    def is_replica(self, which: str) -> bool:
        ((value,),) = self.execute(which, "SELECT pg_is_in_recovery()")
        return bool(value)

    def is_closed(self, which: str, database: str = DATABASE) -> bool:
        sql = "SELECT datallowconn FROM pg_database WHERE datname = %s"
        return self.execute(which, sql, database) == [(False,)]

    def is_read_only(self, which: str) -> bool:
        return self.is_replica(which) or self.is_closed(which)

    def logged(self, which: str) -> str:
        ((value,),) = self.execute(which, "SELECT pg_current_wal_flush_lsn()::text")
        return str(value)

    def replicates(self) -> bool:
        rows = self.execute(
            "second", "SELECT 1 FROM pg_stat_wal_receiver WHERE status = 'streaming'"
        )
        return self.is_replica("second") and bool(rows)

    def wait_until_replicating(self) -> None:
        self._wait(self.replicates)

    def wait_until_received(self) -> None:
        sql = "SELECT pg_last_wal_receive_lsn() >= %s::pg_lsn"
        self._wait(lambda: self.execute("second", sql, self.logged("first")) == [(True,)])

    def wait_until_equal(self) -> None:
        wait_until_equal(self.pair)

    def are_as_before(self) -> bool:
        # The replica knows by replication that the first server is open.
        self.wait_until_replicating()
        self.wait_until_equal()
        return not any(self.is_closed(which) for which in ("first", "second"))

    def open_first(self) -> None:
        self.execute("first", f"ALTER DATABASE {DATABASE} ALLOW_CONNECTIONS true")

    def fence_first(self) -> None:
        self.execute("first", f"ALTER DATABASE {DATABASE} ALLOW_CONNECTIONS false")

    def is_refusal(self, code: int, text: str) -> bool:
        return any(words in text for words in REFUSALS)

    @contextlib.contextmanager
    def locked(self, which: str) -> Iterator[None]:
        """Keep the second server from replaying what comes now, until the end of the block."""
        assert which == "second", "a session cannot keep the fence off"
        table = "photos_00000.entries_entry"
        self.wait_until_equal()
        with connect(self.pair.second) as reader:
            reader.execute(f"BEGIN; SELECT * FROM {table}".encode())
            execute(self.pair.first, f"BEGIN; LOCK TABLE {table}; COMMIT")
            yield

    def promote_and_die(self, where: str, *arguments: str) -> None:
        # Two phases of MariaDB are not needed.
        lacks = where.endswith((":stopping", ":unfencing"))
        super().promote_and_die("end:waiting" if lacks else where, *arguments)

    advice = "db1 stays closed"
    last_before_switching, last_before_switched = "waiting", "promoting"

    def has_logged_nothing_since(self, position: str, promoted_at: str) -> bool:
        # The server itself goes on logging. Nobody gets in.
        return self.is_closed("first")

    def follow_back(self) -> None:
        self.pair.follow(self.pair.first, self.pair.second)

    def stop_receiving(self) -> None:
        (self._conninfo,) = self.execute("second", "SHOW primary_conninfo")[0]
        self._set_conninfo("")
        self._wait(lambda: not self.replicates())

    def start_receiving(self) -> None:
        self._set_conninfo(self._conninfo)

    def _set_conninfo(self, value: str) -> None:
        self.execute("second", f"ALTER SYSTEM SET primary_conninfo = '{value}'")
        self.execute("second", "SELECT pg_reload_conf()")

    def rows(self, which: str) -> set[int]:
        server = self._server(which)
        with contextlib.ExitStack() as stack:
            if self.is_closed(which):
                # Nobody gets in, not even the superuser.
                if self.is_replica(which):
                    pytest.fail("a closed replica tells nothing")
                self.open_first()
                stack.callback(self.fence_first)
            connection = stack.enter_context(connect(server))
            return {
                row[0]
                for schema in SCHEMAS
                for row in connection.execute(
                    f"SELECT entry_id FROM {schema}.entries_entry".encode()
                )
            }

    def write_a_row(self, number: int, which: str = "first") -> None:
        execute(
            self._server(which), "INSERT INTO photos_00000.entries_entry VALUES (%s, 0)", (number,)
        )
