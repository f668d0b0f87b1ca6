"""Private memcached servers: free ports, gone when their owner is gone.

As a pytest fixture: ``memcached`` and ``own_memcached`` of ``tests/conftest.py``. Keyword
arguments are options of the program: ``MemcachedServer(m="8")`` has eight megabytes.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

from tests.services import find_program
from tests.services.server import HOST, PrivateServer, running


class MemcachedServer(PrivateServer):
    """A private memcached server."""

    service = "memcached"

    def _find_programs(self) -> None:
        self._program = find_program(self.service, "memcached")

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def django(self) -> dict[str, Any]:
        """Return an entry for ``CACHES``."""
        return {
            "BACKEND": "django.core.cache.backends.memcached.PyMemcacheCache",
            "LOCATION": self.address,
        }

    def _install(self) -> None:
        """Do nothing: memcached keeps no data."""

    def _command(self, options: dict[str, str | None]) -> list[str]:
        own = {"l": HOST, "p": str(self.port), "U": "0", "m": "64", "t": "2", "c": "1024"}
        # memcached refuses to run as root without this option.
        if os.geteuid() == 0:
            own["u"] = "root"
        command = [self._program]
        for name, value in {**own, **options}.items():
            command += [f"-{name}"] if value is None else [f"-{name}", value]
        return command

    def is_ready(self) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((HOST, self.port), timeout=5) as connection,
        ):
            connection.sendall(b"mn\r\n")
            return connection.recv(4) == b"MN\r\n"
        return False


def servers(
    count: int, **options: str | None
) -> contextlib.AbstractContextManager[list[MemcachedServer]]:
    """Start ``count`` servers at the same time and yield them when they are ready.

    :raises ServiceMissing: memcached is not installed.
    """
    return running(MemcachedServer, count, **options)
