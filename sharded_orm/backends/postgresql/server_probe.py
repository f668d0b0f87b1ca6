"""Find out whether a PostgreSQL server answers at the address of a node.

If libpq cannot connect, a server may have refused the connection, or none may have answered. Only
libpq's message tells which. But it may be in any language, so this module connects to the address
itself to find out.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from typing import Any, Final

from django.db import OperationalError

_PATIENCE: Final = 5.0  # seconds for each address

# A request to use TLS. A server replies to it with one byte before any login, even while it starts
# or shuts down, so no account is needed.
_SSL_REQUEST: Final = struct.pack("!II", 8, 80877103)


class SilentServer(OperationalError):
    """Nothing answers at the address of the server."""


def is_silent(settings: Mapping[str, Any]) -> bool:
    """Whether nothing answers at the address in ``settings``. Called after a session could not be
    opened, to tell a dead server from one that refuses the session.

    False if the address is not known, for example with the option ``service``. Waits up to five
    seconds for each address.

    :param settings: complete settings of a node or of an entry of ``DATABASES``.
    """
    hosts = [host for host in str(settings["HOST"] or "").split(",") if host]
    return bool(hosts) and not any(
        _answers(family, address)
        for host in hosts
        for port in str(settings["PORT"] or 5432).split(",")
        for family, address in _addresses(host, port)
    )


def _addresses(host: str, port: str) -> Iterator[tuple[int, Any]]:
    if host.startswith("/"):
        yield socket.AF_UNIX, f"{host}/.s.PGSQL.{port}"
        return
    with suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            yield family, address


def _answers(family: int, address: Any) -> bool:
    with (
        suppress(OSError),
        closing(socket.socket(family, socket.SOCK_STREAM)) as connection,
    ):
        connection.settimeout(_PATIENCE)
        connection.connect(address)
        connection.sendall(_SSL_REQUEST)
        return bool(connection.recv(1))
    return False
