"""Private MariaDB servers: free ports, temporary folders, gone when their owner is gone.

As a pytest fixture: ``mariadb``, ``mariadb_nodes`` and ``own_mariadb`` of ``tests/conftest.py``.
From a shell::

    python -m tests.services.mariadb [--servers N] -- COMMAND…

runs COMMAND with the addresses in ``SHARDED_ORM_TEST_MYSQL`` (a JSON list of
``{"host", "port", "user", "password"}``), where the fixtures and
``tests.settings.mysql`` find them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.services import find_program
from tests.services.addresses import ServerAddress, environment_of, read_environment
from tests.services.command import run_with_servers
from tests.services.server import HOST, DataTemplate, PrivateServer, running

ENVIRONMENT = "SHARDED_ORM_TEST_MYSQL"
USER = "tester"

_OPTIONS = {
    # The folder is thrown away, so durability is of no use.
    "innodb-flush-log-at-trx-commit": "0",
    "innodb-doublewrite": "0",
    "innodb-log-file-size": "64M",
    "innodb-buffer-pool-size": "128M",
    "skip-log-bin": None,
    # Comparisons with stock need a connection for each of many shards.
    "max-connections": "5000",
    # Thousands of logical shards are thousands of tables.
    "table-open-cache": "20000",
    "table-definition-cache": "20000",
    "open-files-limit": "65535",
    "max-allowed-packet": "64M",
    "skip-name-resolve": None,
    "character-set-server": "utf8mb4",
    "collation-server": "utf8mb4_general_ci",
}

_template = DataTemplate()


@dataclass(frozen=True)
class Address(ServerAddress):
    """Where a server is, also for its driver."""

    def mysqldb(self) -> dict[str, Any]:
        """Return the keyword arguments for ``MySQLdb.connect``."""
        return {
            "host": self.host,
            "port": self.port,
            "user": self.user,
            "password": self.password,
        }


def find() -> str:
    """Return the path of the server's program.

    :raises ServiceMissing: it is not installed.
    """
    return find_program("MariaDB", "mariadbd", "mysqld")


class MariaDBServer(PrivateServer):
    """A private MariaDB server. Keyword arguments are options of ``mariadbd``."""

    service = "MariaDB"

    def _find_programs(self) -> None:
        self._program = find()
        self._installer = find_program(self.service, "mariadb-install-db", "mysql_install_db")

    def _make_template(self, folder: Path) -> None:
        self._run_installer(
            [
                self._installer,
                # Ignore the configuration of the machine.
                "--no-defaults",
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
                f"--innodb-log-file-size={_OPTIONS['innodb-log-file-size']}",
                f"--datadir={folder / 'data'}",
                *_as_root(),
            ],
            {"TMPDIR": str(self._tmp)},
        )

    @property
    def address(self) -> Address:
        return Address(HOST, self.port, USER, self.password)

    @property
    def _tmp(self) -> Path:
        # On its start a server deletes the temporary tables in this folder, even those of other
        # servers. A server that loses its own may crash.
        return self.folder / "tmp"

    def _install(self) -> None:
        self._tmp.mkdir()
        self._copy_template(_template)
        account = f"'{USER}'@'%'"
        (self.folder / "init.sql").write_text(
            # A restart writes nothing into the binary log.
            "SET sql_log_bin = 0;\n"
            f"CREATE USER IF NOT EXISTS {account} IDENTIFIED BY '{self.password}';\n"
            f"GRANT ALL PRIVILEGES ON *.* TO {account} WITH GRANT OPTION;\n"
        )

    def _command(self, options: dict[str, str | None]) -> list[str]:
        own = {
            "datadir": str(self.folder / "data"),
            "socket": str(self.folder / "socket"),
            "pid-file": str(self.folder / "pid"),
            "init-file": str(self.folder / "init.sql"),
            "tmpdir": str(self._tmp),
            "bind-address": HOST,
            "port": str(self.port),
        }
        more = {name.replace("_", "-"): value for name, value in options.items()}
        return [
            self._program,
            "--no-defaults",
            *(
                f"--{name}" if value is None else f"--{name}={value}"
                for name, value in {**_OPTIONS, **own, **more}.items()
            ),
            *_as_root(),
        ]

    def is_ready(self) -> bool:
        """Whether the server answers a connection with its handshake (protocol 10)."""
        try:
            with socket.create_connection((HOST, self.port), timeout=5) as connection:
                return connection.recv(5)[4:5] == b"\x0a"
        except OSError:
            return False


def servers(
    count: int, **options: str | None
) -> contextlib.AbstractContextManager[list[MariaDBServer]]:
    """Start ``count`` servers at the same time and yield them when they are ready.

    :raises ServiceMissing: MariaDB is not installed.
    """
    return running(MariaDBServer, count, **options)


def addresses_from_environment() -> list[Address]:
    """Return the addresses of servers that already run for these tests; empty if there are none."""
    return read_environment(ENVIRONMENT, Address)


def to_environment(addresses: list[Address]) -> dict[str, str]:
    """Return the environment variable that :func:`addresses_from_environment` reads."""
    return environment_of(ENVIRONMENT, addresses)


def _as_root() -> list[str]:
    # mariadbd refuses to run as root without this option; other users may not set it.
    return ["--user=root"] if os.geteuid() == 0 else []


if __name__ == "__main__":
    sys.exit(run_with_servers(MariaDBServer.service, ENVIRONMENT, servers))
