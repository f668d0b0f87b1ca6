"""Two private PostgreSQL servers, the second a replica of the first by streaming replication.

They have the accounts of a site: one for the application, one for the operator, and one for the
replication. A promotion of PostgreSQL cannot be taken back, so a test gets copies of the data of both.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from tests.patience import PATIENCE
from tests.services.postgresql import DATABASE, PostgreSQLServer
from tests.services.server import HOST

REPLICATION = ("replication", "replication-password")
APPLICATION = ("application", "application-password")
OPERATOR = ("operator", "operator-password")
#: A second database with shards.
OTHER_DATABASE = "other"

_OPTIONS = {
    # A replica that has lost its primary tries again soon.
    "wal_retrieve_retry_interval": "100ms",
    "wal_keep_size": "32MB",
    # A reader keeps a replica from replaying what he is in the way of, for as long as he likes.
    "max_standby_streaming_delay": "-1",
}
_ACCOUNTS = (
    f"CREATE ROLE {REPLICATION[0]} LOGIN REPLICATION PASSWORD '{REPLICATION[1]}'",
    f"CREATE ROLE {APPLICATION[0]} LOGIN PASSWORD '{APPLICATION[1]}'",
    f"CREATE ROLE {OPERATOR[0]} LOGIN PASSWORD '{OPERATOR[1]}'",
    f"CREATE DATABASE {OTHER_DATABASE}",
    f"ALTER DATABASE {DATABASE} OWNER TO {APPLICATION[0]}",
    f"ALTER DATABASE {OTHER_DATABASE} OWNER TO {APPLICATION[0]}",
    f"GRANT {APPLICATION[0]}, pg_monitor, pg_signal_backend TO {OPERATOR[0]}",
    f"GRANT EXECUTE ON FUNCTION pg_promote(boolean, integer) TO {OPERATOR[0]}",
)


class StreamingServer(PostgreSQLServer):
    """A server that may be a replica."""

    def _command(self, options: dict[str, str | None]) -> list[str]:
        return super()._command({**_OPTIONS, **options})

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def replace_data(self, source: Path) -> None:
        """Replace the data by a copy. The server does not run then."""
        if self.pid is not None:
            self.kill()
        shutil.rmtree(self.data, ignore_errors=True)
        self._run_installer(["cp", "-r", "--sparse=always", str(source), str(self.data)])

    def back_up(self, primary: StreamingServer) -> None:
        """Replace the data by a backup of ``primary``."""
        if self.pid is not None:
            self.kill()
        shutil.rmtree(self.data, ignore_errors=True)
        self._run_installer(
            [
                str(self._programs / "pg_basebackup"),
                f"--pgdata={self.data}",
                f"--host={HOST}",
                f"--port={primary.port}",
                f"--username={REPLICATION[0]}",
                "--checkpoint=fast",
                "--no-sync",
            ],
            env={"PGPASSWORD": REPLICATION[1]},
        )

    def make_replica_of(self, primary: StreamingServer) -> None:
        """Have the server follow ``primary`` as soon as it starts. It must have a copy of the data."""
        account, password = REPLICATION
        conninfo = f"host={HOST} port={primary.port} user={account} password={password}"
        self.write_setting("primary_conninfo", conninfo)
        self._run_installer(["touch", str(self.data / "standby.signal")])

    def write_setting(self, name: str, value: str) -> None:
        """Set a parameter in a file that the server reads when it starts."""
        with open(self.data / "postgresql.auto.conf", "a") as file:
            file.write(f"{name} = '{value}'\n")


@dataclass
class StreamingPair:
    """The servers; ``second`` replicates from ``first`` until a test changes that."""

    first: StreamingServer
    second: StreamingServer
    _saved: dict[tuple[str, ...], Path] = field(default_factory=dict)

    def node(self, server: StreamingServer, **more: Any) -> dict[str, Any]:
        """Return settings of a node as a site has them, without the all-powerful account."""
        return {
            "ENGINE": "sharded_orm.backends.postgresql",
            "NAME": DATABASE,
            "HOST": HOST,
            "PORT": server.port,
            "USER": APPLICATION[0],
            "PASSWORD": APPLICATION[1],
            "OPERATOR": {"USER": OPERATOR[0], "PASSWORD": OPERATOR[1]},
            **more,
        }

    def follow(self, replica: StreamingServer, primary: StreamingServer) -> None:
        """Make ``replica`` anew from a backup of ``primary``, and start it."""
        replica.back_up(primary)
        replica.make_replica_of(primary)
        replica.start()

    def reset(self, statements: Sequence[str]) -> None:
        """Reset both servers: they run with the data that ``statements`` make, and the second
        replicates from the first.

        The statements are run once, by the application's account in :data:`DATABASE`.
        """
        key = tuple(statements)
        if key not in self._saved:
            self._save(key)
        saved = self._saved[key]
        for server in (self.first, self.second):
            server.replace_data(saved)
        self.second.make_replica_of(self.first)
        for server in (self.first, self.second):
            server.start(wait=False)
        for server in (self.first, self.second):
            server.wait_ready()
        wait_until_receiving(self)

    def _save(self, statements: tuple[str, ...]) -> None:
        first = self.first
        if not self._saved:
            # Nothing of before is in the data: the template of the tests.
            for statement in _ACCOUNTS:
                execute(first, statement, database="postgres")
            first.stop()
            self._saved[()] = first.folder / "saved-accounts"
            first._run_installer(["cp", "-r", str(first.data), str(self._saved[()])])
        else:
            first.replace_data(self._saved[()])
        first.start()
        for statement in statements:
            execute(first, statement, account=APPLICATION)
        first.stop()
        self._saved[statements] = first.folder / f"saved-{len(self._saved)}"
        first._run_installer(["cp", "-r", str(first.data), str(self._saved[statements])])


def execute(
    server: PostgreSQLServer,
    sql: str,
    parameters: Sequence[Any] = (),
    *,
    database: str = DATABASE,
    account: tuple[str, str] | None = None,
) -> list[tuple[Any, ...]]:
    """Run a statement on a new connection, by default of the account that may do everything."""
    with connect(server, database, account) as connection:
        cursor = connection.execute(sql.encode(), parameters or None)
        return cursor.fetchall() if cursor.description else []


@contextlib.contextmanager
def connect(
    server: PostgreSQLServer, database: str = DATABASE, account: tuple[str, str] | None = None
) -> Iterator[psycopg.Connection[Any]]:
    """Give a connection in autocommit."""
    options = server.address.psycopg(database)
    if account is not None:
        options["user"], options["password"] = account
    connection = psycopg.connect(**options, autocommit=True)
    with contextlib.closing(connection):
        yield connection


@contextlib.contextmanager
def streaming_pair() -> Iterator[StreamingPair]:
    """Start two servers; :meth:`StreamingPair.reset` gives them data.

    :raises ServiceMissing: PostgreSQL is not installed.
    """
    with contextlib.ExitStack() as stack:
        servers = [StreamingServer() for _ in range(2)]
        for server in servers:
            stack.callback(server.close)
        for server in servers:
            server.wait_ready()
        yield StreamingPair(*servers)


def wait_until_receiving(pair: StreamingPair) -> None:
    """Return when the second server receives from the first."""
    sql = "SELECT count(*) FROM pg_stat_wal_receiver WHERE status = 'streaming'"
    _wait(pair.second, sql, (), (1,))


def wait_until_equal(pair: StreamingPair) -> None:
    """Return when the second server has replayed all that the first has logged."""
    ((position,),) = execute(pair.first, "SELECT pg_current_wal_flush_lsn()", database="postgres")
    _wait(pair.second, "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", (position,), (True,))


def _wait(
    server: PostgreSQLServer, sql: str, parameters: Sequence[Any], answer: tuple[Any, ...]
) -> None:
    end = time.monotonic() + PATIENCE
    while execute(server, sql, parameters, database="postgres") != [answer]:
        assert time.monotonic() < end
        time.sleep(0.02)  # between two questions
