"""Two private MariaDB servers, the second replicating from the first (binlog, GTID).

They have the accounts of a site: one for the application, which may not write through
``read_only``, one for the operator and one for the replication.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import MySQLdb

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
        """Reset both servers: they run, have no schemas that begin with the prefix, and the second
        replicates from the first.

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
        self.follow(self.second, self.first)


def execute(
    server: MariaDBServer, sql: str, parameters: tuple[Any, ...] | None = None
) -> list[tuple[Any, ...]]:
    """Run a statement on a new connection of the account that may do everything."""
    connection = MySQLdb.connect(**server.address.mysqldb(), autocommit=True)
    with contextlib.closing(connection), connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return list(cursor.fetchall())


@contextlib.contextmanager
def replicated_pair(**options: str | None) -> Iterator[Pair]:
    """Start two servers with equal data, in replication.

    :param options: further options of both servers.
    :raises ServiceMissing: MariaDB is not installed.
    """
    with contextlib.ExitStack() as stack:
        servers = [LoggingServer(**{"server-id": str(number), **options}) for number in (1, 2)]
        for server in servers:
            stack.callback(server.close)
        for server in servers:
            server.wait_ready()
            # Created on both servers without replication, as that is reset all the time.
            _create_account(server, REPLICATION, "REPLICATION SLAVE")
            _create_account(server, APPLICATION, APPLICATION_PRIVILEGES, "`%%`.*")
            _create_account(server, OPERATOR, _OPERATOR_PRIVILEGES)
        yield Pair(*servers)


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
