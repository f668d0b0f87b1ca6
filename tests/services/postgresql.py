"""Private PostgreSQL servers: free ports, temporary folders, gone when their owner is gone.

As a pytest fixture: ``postgresql``, ``postgresql_nodes`` and ``own_postgresql`` of
``tests/conftest.py``. From a shell::

    python -m tests.services.postgresql [--servers N] -- COMMAND…

runs COMMAND with the addresses in ``SHARDED_ORM_TEST_POSTGRESQL`` (a JSON list of
``{"host", "port", "user", "password"}``), where the fixtures and
``tests.settings.postgresql`` find them. Each server has the empty database ``DATABASE`` for the
schemas of shards.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.services import find_program
from tests.services.addresses import ServerAddress, environment_of, read_environment
from tests.services.command import run_with_servers
from tests.services.server import HOST, DataTemplate, PrivateServer, running

ENVIRONMENT = "SHARDED_ORM_TEST_POSTGRESQL"
SUPERUSER = "tester"
#: An empty database of each server.
DATABASE = "site"
#: PostgreSQL refuses to run as root, and looks up the name of its user.
ACCOUNT = "nobody"

_OPTIONS = {
    # Only a crash of the machine needs it: a killed server keeps what it has acknowledged.
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    # A statement over many shards locks their tables and indexes.
    "max_locks_per_transaction": "256",
    "max_prepared_transactions": "20",
    "shared_buffers": "64MB",
    # In the data folder, which goes; the shared memory of a killed server stays.
    "dynamic_shared_memory_type": "mmap",
    "unix_socket_directories": "",
    "log_destination": "stderr",
    "logging_collector": "off",
}
#: Debian keeps the programs of each version in a folder of their own.
FOLDERS = tuple(f"/usr/lib/postgresql/{version}/bin" for version in range(18, 12, -1))

_template = DataTemplate()


@dataclass(frozen=True)
class Address(ServerAddress):
    """Where a server is, also for its driver."""

    def node(self, **more: Any) -> dict[str, Any]:
        """Return the settings of a node whose shards are schemas of the empty database.

        :param more: further settings, or others.
        """
        return {
            "ENGINE": "sharded_orm.backends.postgresql",
            "NAME": DATABASE,
            **self.django(),
            **more,
        }

    def psycopg(self, database: str = "postgres") -> dict[str, Any]:
        """Return the keyword arguments for ``psycopg.connect``."""
        return {
            "host": self.host,
            "port": self.port,
            "user": self.user,
            "password": self.password,
            "dbname": database,
        }


def find() -> str:
    """Return the path of the server's program.

    :raises ServiceMissing: it is not installed.
    """
    return find_program("PostgreSQL", "postgres", folders=FOLDERS)


class PostgreSQLServer(PrivateServer):
    """A private PostgreSQL server. Keyword arguments are settings of ``postgresql.conf``."""

    service = "PostgreSQL"
    stop_signal = signal.SIGINT  # SIGTERM waits for the clients to leave

    def _find_programs(self) -> None:
        self._program = find()
        # Those of the same version.
        self._programs = Path(self._program).resolve().parent
        self.account = unprivileged_account()

    @property
    def address(self) -> Address:
        return Address(HOST, self.port, SUPERUSER, self.password)

    def _make_template(self, folder: Path) -> None:
        data, secret = folder / "data", folder / "password"
        secret.write_text(secrets.token_hex(8))
        self._run_installer(
            [
                str(self._programs / "initdb"),
                f"--pgdata={data}",
                f"--username={SUPERUSER}",
                f"--pwfile={secret}",
                "--auth=scram-sha-256",
                "--encoding=UTF8",
                # Ignore the locale of the machine.
                "--locale=C",
                "--no-sync",
            ]
        )
        self._run_installer(
            [self._program, "--single", "-F", "-D", str(data), "postgres"],
            text=f"CREATE DATABASE {DATABASE}\n",
        )

    def _install(self) -> None:
        data = self._copy_template(_template)
        # Servers of one template have its password.
        self.password = (_template.folder(self) / "password").read_text()
        # A replica, for one, tells by this number whether it belongs to a server.
        _renumber(data / "global" / "pg_control")
        # The write-ahead log has the number as well.
        self._run_installer([str(self._programs / "pg_resetwal"), "-D", str(data)])

    def _command(self, options: dict[str, str | None]) -> list[str]:
        own = {"listen_addresses": HOST, "port": str(self.port)}
        return [
            self._program,
            "-D",
            str(self.folder / "data"),
            *(f"--{name}={value}" for name, value in {**_OPTIONS, **own, **options}.items()),
        ]

    def is_ready(self) -> bool:
        """Whether the server asks a client for a password.

        While it starts, recovers or shuts down it answers with an error.
        """
        return asks_for_password(self.port)


def unprivileged_account() -> tuple[int, int] | None:
    """Return user and group of programs that refuse to run as root; None if we are not root."""
    if os.geteuid() != 0:
        return None
    entry = pwd.getpwnam(ACCOUNT)
    return entry.pw_uid, entry.pw_gid


def asks_for_password(port: int) -> bool:
    """Whether a program that speaks PostgreSQL's protocol asks the superuser for a password."""
    words = f"user\0{SUPERUSER}\0database\0postgres\0\0".encode()
    greeting = (8 + len(words)).to_bytes(4) + (3 << 16).to_bytes(4) + words
    with (
        contextlib.suppress(OSError),
        socket.create_connection((HOST, port), timeout=5) as connection,
    ):
        connection.sendall(greeting)
        return connection.recv(1) == b"R"
    return False


def _renumber(control: Path) -> None:
    """Give the data another system identifier, which ``initdb`` makes and nothing changes.

    :param control: the file ``pg_control`` of a server that was shut down.
    """
    content = control.read_bytes()
    # The checksum is the last word of the values, whose number differs between versions.
    end = next(n for n in range(64, 512, 4) if _crc32c(content[:n]) == content[n : n + 4])
    values = secrets.token_bytes(8) + content[8:end]
    control.write_bytes(values + _crc32c(values) + content[end + 4 :])


def _crc32c(data: bytes) -> bytes:
    """Return the checksum (Castagnoli's polynomial) as four bytes in the order of the machine."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return (crc ^ 0xFFFFFFFF).to_bytes(4, sys.byteorder)


def servers(
    count: int, **options: str | None
) -> contextlib.AbstractContextManager[list[PostgreSQLServer]]:
    """Start ``count`` servers at the same time and yield them when they are ready.

    :raises ServiceMissing: PostgreSQL is not installed.
    """
    return running(PostgreSQLServer, count, **options)


def addresses_from_environment() -> list[Address]:
    """Return the addresses of servers that already run for these tests; empty if there are none."""
    return read_environment(ENVIRONMENT, Address)


def to_environment(addresses: list[Address]) -> dict[str, str]:
    """Return the environment variable that :func:`addresses_from_environment` reads."""
    return environment_of(ENVIRONMENT, addresses)


if __name__ == "__main__":
    sys.exit(run_with_servers(PostgreSQLServer.service, ENVIRONMENT, servers))
