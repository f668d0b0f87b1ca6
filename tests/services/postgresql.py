"""Private PostgreSQL servers: free ports, temporary folders, gone when their owner is gone.

As a pytest fixture: ``postgresql`` and ``own_postgresql`` of ``tests/conftest.py``.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.services import find_program
from tests.services.server import HOST, PrivateServer, running

SUPERUSER = "tester"
#: PostgreSQL refuses to run as root, and looks up the name of its user.
ACCOUNT = "nobody"

_OPTIONS = {
    # Only a crash of the machine needs it: a killed server keeps what it has acknowledged.
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "unix_socket_directories": "",
    "log_destination": "stderr",
    "logging_collector": "off",
}
# Debian keeps the programs of each version in a folder of their own.
_FOLDERS = tuple(f"/usr/lib/postgresql/{version}/bin" for version in range(18, 12, -1))


@dataclass(frozen=True)
class Address:
    """Host and port of a server, and an account that may do everything."""

    host: str
    port: int
    user: str
    password: str

    def django(self) -> dict[str, Any]:
        """Return the part of an entry of ``DATABASES`` that names the server."""
        return {
            "HOST": self.host,
            "PORT": self.port,
            "USER": self.user,
            "PASSWORD": self.password,
        }

    def psycopg(self) -> dict[str, Any]:
        """Return the keyword arguments for ``psycopg.connect``."""
        return {
            "host": self.host,
            "port": self.port,
            "user": self.user,
            "password": self.password,
            "dbname": "postgres",
        }


class PostgreSQLServer(PrivateServer):
    """A private PostgreSQL server. Keyword arguments are settings of ``postgresql.conf``."""

    service = "PostgreSQL"
    stop_signal = signal.SIGINT  # SIGTERM waits for the clients to leave

    def _find_programs(self) -> None:
        self._program = find_program(self.service, "postgres", folders=_FOLDERS)
        # initdb of the same version.
        self._installer = str(Path(self._program).resolve().with_name("initdb"))
        if os.geteuid() == 0:
            entry = pwd.getpwnam(ACCOUNT)
            self.account = (entry.pw_uid, entry.pw_gid)

    @property
    def address(self) -> Address:
        return Address(HOST, self.port, SUPERUSER, self.password)

    def _install(self) -> None:
        secret = self.folder / "password"
        secret.write_text(self.password)
        self._run_installer(
            [
                self._installer,
                f"--pgdata={self.folder / 'data'}",
                f"--username={SUPERUSER}",
                f"--pwfile={secret}",
                "--auth=scram-sha-256",
                "--encoding=UTF8",
                # Ignore the locale of the machine.
                "--locale=C",
                "--no-sync",
            ]
        )

    def _command(self, options: dict[str, str | None]) -> list[str]:
        own = {"listen_addresses": HOST, "port": str(self.port)}
        return [
            self._program,
            "-D",
            str(self.folder / "data"),
            *(f"--{name}={value}" for name, value in {**_OPTIONS, **own, **options}.items()),
        ]

    def is_ready(self) -> bool:
        """Whether the server asks a client that greets it for a password.

        While it starts, recovers or shuts down it answers with an error.
        """
        words = b"user\0tester\0database\0postgres\0\0"
        greeting = (8 + len(words)).to_bytes(4) + (3 << 16).to_bytes(4) + words
        with (
            contextlib.suppress(OSError),
            socket.create_connection((HOST, self.port), timeout=5) as connection,
        ):
            connection.sendall(greeting)
            return connection.recv(1) == b"R"
        return False


def servers(
    count: int, **options: str | None
) -> contextlib.AbstractContextManager[list[PostgreSQLServer]]:
    """Start ``count`` servers at the same time and yield them when they are ready.

    :raises ServiceMissing: PostgreSQL is not installed.
    """
    return running(PostgreSQLServer, count, **options)
