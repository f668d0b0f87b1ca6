"""Two private MariaDB servers in replication (binlog, GTID).

:func:`replicated_pair` starts a primary and its replica, :func:`master_pair` two servers that replicate
from each other. They have the accounts of a site: one for the application, which may not write through
``read_only``, one for the operator and one for the replication.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import MySQLdb
from MySQLdb.cursors import DictCursor

from tests.services.mariadb import MariaDBServer
from tests.services.server import HOST

REPLICATION = ("replication", "replication-password")
APPLICATION = ("application", "application-password")
OPERATOR = ("operator", "operator-password")

_OPTIONS = {
    "log-bin": "binlog",
    "log-slave-updates": None,
    "gtid-strict-mode": "1",
    # A replica that has lost its primary tries again soon.
    "master-retry-count": "0",
    # Thousands of schemas are not needed here.
    "max-connections": "500",
    "table-open-cache": "2000",
    "table-definition-cache": "2000",
    "innodb-buffer-pool-size": "64M",
}
#: All that an application needs, on schemas of any name; no privilege on the whole server.
APPLICATION_PRIVILEGES = (
    "SELECT, INSERT, UPDATE, DELETE, CREATE, DROP, ALTER, INDEX, REFERENCES,"
    " CREATE TEMPORARY TABLES, LOCK TABLES"
)
_OPERATOR_PRIVILEGES = (
    "READ_ONLY ADMIN, REPLICATION SLAVE ADMIN, SLAVE MONITOR, BINLOG MONITOR, PROCESS"
)
# The operator of servers that replicate from each other also changes the schemas of one side only.
_PAIR_OPERATOR_PRIVILEGES = f"{_OPERATOR_PRIVILEGES}, BINLOG ADMIN, BINLOG REPLAY, CONNECTION ADMIN, RELOAD, REPLICATION MASTER ADMIN"
_SCHEMA_PRIVILEGES = (
    f"{APPLICATION_PRIVILEGES}, TRIGGER, EVENT, CREATE ROUTINE, ALTER ROUTINE, EXECUTE"
)


class LoggingServer(MariaDBServer):
    """A server with a binary log."""

    def _command(self, options: dict[str, str | None]) -> list[str]:
        command = super()._command({**_OPTIONS, **options})
        return [part for part in command if part != "--skip-log-bin"]


@dataclass(frozen=True)
class Pair:
    """The servers; ``second`` replicates from ``first`` until a test changes that."""

    first: LoggingServer
    second: LoggingServer

    def node(self, server: LoggingServer, **more: Any) -> dict[str, Any]:
        """Return settings of a node as a site has them, without the all-powerful account."""
        return {
            "ENGINE": "sharded_orm.backends.mysql",
            "HOST": HOST,
            "PORT": server.port,
            "USER": APPLICATION[0],
            "PASSWORD": APPLICATION[1],
            "OPERATOR": {"USER": OPERATOR[0], "PASSWORD": OPERATOR[1]},
            "OPTIONS": {"charset": "utf8mb4"},
            **more,
        }

    def follow(self, replica: LoggingServer, primary: LoggingServer) -> None:
        """Let ``replica`` start to replicate from ``primary``; it refuses other writes."""
        execute(
            replica,
            "CHANGE MASTER TO MASTER_HOST = %s, MASTER_PORT = %s, MASTER_USER = %s,"
            " MASTER_PASSWORD = %s, MASTER_USE_GTID = current_pos, MASTER_CONNECT_RETRY = 1",
            (HOST, primary.port, *REPLICATION),
        )
        execute(replica, "SET GLOBAL read_only = ON")
        execute(replica, "START SLAVE")

    def reset(self, schemas: str) -> None:
        """Reset both servers: they run, have no schemas that begin with the prefix, and replicate as
        at first.

        Replication, positions and fences of the test before are removed.
        """
        for server in (self.first, self.second):
            if server.pid is None:
                server.start()
            execute(server, "STOP ALL SLAVES")
            execute(server, "RESET SLAVE ALL")
            execute(server, "SET GLOBAL read_only = OFF")
            for (name,) in execute(server, "SHOW DATABASES LIKE %s", (f"{schemas}%",)):
                execute(server, f"DROP DATABASE `{name}`")
            execute(server, "RESET MASTER")
            execute(server, "SET GLOBAL gtid_slave_pos = ''")
        self.connect()

    def connect(self) -> None:
        """Start the replication between two servers without any position."""
        self.follow(self.second, self.first)


class MasterPair(Pair):
    """Two servers that replicate from each other. Both take writes, as a site has opened them.

    In their configuration they are read only, and their events have a GTID domain each.
    """

    def node(self, server: LoggingServer, **more: Any) -> dict[str, Any]:
        account = {"USER": REPLICATION[0], "PASSWORD": REPLICATION[1]}
        return super().node(server, REPLICATION=account, **more)

    def connect(self) -> None:
        for server in (self.first, self.second):
            self.follow(server, self.other(server))
        for server in (self.first, self.second):
            execute(server, "SET GLOBAL read_only = OFF")

    def follow(self, replica: LoggingServer, primary: LoggingServer) -> None:
        """Let ``replica`` start to replicate from ``primary``."""
        execute(
            replica,
            "CHANGE MASTER TO MASTER_HOST = %s, MASTER_PORT = %s, MASTER_USER = %s,"
            " MASTER_PASSWORD = %s, MASTER_USE_GTID = slave_pos, MASTER_CONNECT_RETRY = 1",
            (HOST, primary.port, *REPLICATION),
        )
        execute(replica, "START SLAVE")

    def other(self, server: LoggingServer) -> LoggingServer:
        return self.second if server is self.first else self.first

    def settle(self) -> None:
        """Return when each server has all events that the other has written until now."""
        for server in (self.first, self.second):
            wait_for_events(server, self.other(server))


def execute(
    server: MariaDBServer, sql: str, parameters: tuple[Any, ...] | None = None
) -> list[tuple[Any, ...]]:
    """Run a statement on a new connection of the account that may do everything."""
    connection = MySQLdb.connect(**server.address.mysqldb(), autocommit=True)
    with contextlib.closing(connection), connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return list(cursor.fetchall())


def execute_alone(server: MariaDBServer, *statements: str) -> None:
    """Run statements that the server does not write into its binary log."""
    connection = MySQLdb.connect(**server.address.mysqldb(), autocommit=True)
    with contextlib.closing(connection), connection.cursor() as cursor:
        cursor.execute("SET sql_log_bin = 0")
        for statement in statements:
            cursor.execute(statement)


def replication_status(server: MariaDBServer) -> dict[str, Any]:
    """Return the state of a server's only replication connection, as the server names its parts."""
    connection = MySQLdb.connect(**server.address.mysqldb())
    with contextlib.closing(connection), connection.cursor(DictCursor) as cursor:
        cursor.execute("SHOW ALL SLAVES STATUS")
        (row,) = cursor.fetchall()
    return dict(row)


@contextlib.contextmanager
def replicated_pair(**options: str | None) -> Iterator[Pair]:
    """Start two servers with equal data, in replication.

    :param options: further options of both servers.
    :raises ServiceMissing: MariaDB is not installed.
    """
    own = [{"server-id": str(number)} for number in (1, 2)]
    with _servers([{**each, **options} for each in own]) as servers:
        for server in servers:
            _create_account(server, OPERATOR, _OPERATOR_PRIVILEGES)
        yield Pair(*servers)


@contextlib.contextmanager
def master_pair(
    *,
    first: dict[str, str | None] | None = None,
    second: dict[str, str | None] | None = None,
    **options: str | None,
) -> Iterator[MasterPair]:
    """Start two servers that replicate from each other.

    :param first: further options of the first server; ``second`` are those of the second.
    :param options: further options of both servers.
    :raises ServiceMissing: MariaDB is not installed.
    """
    with master_servers(first=first, second=second, **options) as pair:
        pair.connect()
        yield pair


@contextlib.contextmanager
def master_servers(
    *,
    first: dict[str, str | None] | None = None,
    second: dict[str, str | None] | None = None,
    **options: str | None,
) -> Iterator[MasterPair]:
    """Start two servers that can replicate from each other, and do not yet. They are read only, as their
    configuration says.

    The arguments and the error are those of :func:`master_pair`.
    """
    both = {
        "binlog-format": "ROW",
        "read-only": None,
        # Fences have a function.
        "log-bin-trust-function-creators": "1",
        **options,
    }
    own = [
        {"server-id": str(number), "gtid-domain-id": str(number), **both, **(more or {})}
        for number, more in ((1, first), (2, second))
    ]
    with _servers(own) as servers:
        for server in servers:
            _create_account(server, OPERATOR, _PAIR_OPERATOR_PRIVILEGES)
            execute(server, f"GRANT {_SCHEMA_PRIVILEGES} ON `%%`.* TO %s@'%%'", OPERATOR[:1])
            # The events so far, the accounts, are the same on both.
            execute(server, "RESET MASTER")
        yield MasterPair(*servers)


@contextlib.contextmanager
def _servers(options: list[dict[str, str | None]]) -> Iterator[list[LoggingServer]]:
    """Start a server with each of ``options``. They have the accounts of application and replication."""
    with contextlib.ExitStack() as stack:
        servers = [LoggingServer(**each) for each in options]
        for server in servers:
            stack.callback(server.close)
        for server in servers:
            server.wait_ready()
            # Created on both servers without replication, as that is reset all the time.
            _create_account(server, REPLICATION, "REPLICATION SLAVE")
            _create_account(server, APPLICATION, APPLICATION_PRIVILEGES, "`%%`.*")
        yield servers


def wait_for_events(replica: LoggingServer, primary: LoggingServer) -> None:
    """Return when ``replica`` has executed all events that ``primary`` itself has written until now."""
    ((domain, logged),) = execute(primary, "SELECT @@gtid_domain_id, @@gtid_binlog_pos")
    own = [gtid for gtid in logged.split(",") if gtid.startswith(f"{domain}-")]
    ((outcome,),) = execute(replica, "SELECT MASTER_GTID_WAIT(%s, 300)", (",".join(own),))
    assert outcome == 0, f"the replica does not get to {own}"


def wait_until_equal(pair: Pair) -> None:
    """Return when the second server has all events of the first."""
    ((position,),) = execute(pair.first, "SELECT @@gtid_binlog_pos")
    ((outcome,),) = execute(pair.second, "SELECT MASTER_GTID_WAIT(%s, 300)", (position,))
    assert outcome == 0, f"the replica does not get to {position}"


def _create_account(
    server: MariaDBServer, account: tuple[str, str], privileges: str, on: str = "*.*"
) -> None:
    execute(server, "CREATE USER %s@'%%' IDENTIFIED BY %s", account)
    execute(server, f"GRANT {privileges} ON {on} TO %s@'%%'", account[:1])
