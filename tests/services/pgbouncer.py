"""Private PgBouncers in front of PostgreSQL servers of the tests: free ports, gone with their owner.

As a pytest fixture: ``pgbouncer``, ``pgbouncer_nodes`` and ``own_pgbouncer`` of
``tests/conftest.py``. Keyword arguments are settings of ``pgbouncer.ini``:
``PgBouncer(server.address, pool_mode="session")``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from tests.services import find_program
from tests.services.postgresql import Address, asks_for_password, unprivileged_account
from tests.services.server import HOST, PrivateServer

#: Sessions with the server for each database; all that use the pooler share them.
POOL_SIZE = 4


class PgBouncer(PrivateServer):
    """A private PgBouncer in transaction mode, for all databases of one server.

    :param server: the server behind it.
    """

    service = "PgBouncer"

    def __init__(self, server: Address, **options: str | None) -> None:
        self._server = server
        super().__init__(**options)

    def _find_programs(self) -> None:
        self._program = find_program(self.service, "pgbouncer")
        # It refuses to run as root, too.
        self.account = unprivileged_account()

    @property
    def address(self) -> Address:
        """Where clients connect: with the account of the server."""
        return Address(HOST, self.port, self._server.user, self._server.password)

    def _install(self) -> None:
        """Do nothing: the only files are those of the settings."""

    def _command(self, options: dict[str, str | None]) -> list[str]:
        accounts = self.folder / "accounts"
        # In plain text: PgBouncer also has to log in at the server.
        accounts.write_text(f'"{self._server.user}" "{self._server.password}"\n')
        settings = {
            "listen_addr": HOST,
            "listen_port": str(self.port),
            "unix_socket_dir": "",
            "auth_type": "scram-sha-256",
            "auth_file": str(accounts),
            "admin_users": self._server.user,
            "pool_mode": "transaction",
            "default_pool_size": str(POOL_SIZE),
            "max_client_conn": "2000",
            **options,
        }
        file = self.folder / "pgbouncer.ini"
        lines = [
            "[databases]",
            f"* = host={self._server.host} port={self._server.port}",
            "[pgbouncer]",
            *(f"{name} = {value or ''}" for name, value in settings.items()),
        ]
        file.write_text("\n".join(lines) + "\n")
        return [self._program, str(file)]

    def is_ready(self) -> bool:
        """Whether it serves clients; the server behind it may be down."""
        return asks_for_password(self.port)


@contextlib.contextmanager
def poolers(servers: Sequence[Address], **options: str | None) -> Iterator[list[PgBouncer]]:
    """Start a PgBouncer for each of ``servers`` and yield them when they are ready.

    :raises ServiceMissing: PgBouncer is not installed.
    """
    with contextlib.ExitStack() as stack:
        started = []
        for server in servers:
            started.append(pooler := PgBouncer(server, **options))
            stack.callback(pooler.close)
        for pooler in started:
            pooler.wait_ready()
        yield started
