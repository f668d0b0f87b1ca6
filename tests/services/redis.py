"""Private Redis servers: free ports, gone when their owner is gone.

As a pytest fixture: ``redis_server`` and ``own_redis`` of ``tests/conftest.py``. Keyword
arguments are options of ``redis.conf``: ``RedisServer(maxmemory="8mb")``.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from tests.services import find_program
from tests.services.server import HOST, PrivateServer, running


class RedisServer(PrivateServer):
    """A private Redis server with a password. It forgets everything when it ends."""

    service = "Redis"

    def _find_programs(self) -> None:
        self._program = find_program(self.service, "redis-server", "valkey-server")

    @property
    def url(self) -> str:
        """The URL of database 0, without the password."""
        return f"redis://{HOST}:{self.port}/0"

    def django(self) -> dict[str, Any]:
        """Return an entry for ``CACHES``."""
        return {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": self.url,
            "OPTIONS": {"PASSWORD": self.password},
        }

    def _install(self) -> None:
        """Do nothing: the server keeps no data."""

    def _command(self, options: dict[str, str | None]) -> list[str]:
        own = {
            "bind": HOST,
            "port": str(self.port),
            "dir": str(self.folder),
            "requirepass": self.password,
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
        }
        command = [self._program]
        for name, value in {**own, **options}.items():
            command += [f"--{name.replace('_', '-')}", value or ""]
        return command

    def is_ready(self) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((HOST, self.port), timeout=5) as connection,
        ):
            # A server that still loads its saved data refuses the second command.
            connection.sendall(f"AUTH {self.password}\r\nPING\r\n".encode())
            answers = connection.makefile("rb")
            return [answers.readline(), answers.readline()] == [b"+OK\r\n", b"+PONG\r\n"]
        return False


def servers(
    count: int, **options: str | None
) -> contextlib.AbstractContextManager[list[RedisServer]]:
    """Start ``count`` servers at the same time and yield them when they are ready.

    :raises ServiceMissing: Redis is not installed.
    """
    return running(RedisServer, count, **options)
