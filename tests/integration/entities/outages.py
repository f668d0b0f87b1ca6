"""Sites whose node ``db2`` goes down and comes back."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

from tests.conftest import service_missing
from tests.integration.entities.site import Site
from tests.integration.imports.site import S
from tests.integration.imports.stored_sites import set_up_once
from tests.services import ServiceMissing
from tests.services.mariadb import MariaDBServer
from tests.services.postgresql import PostgreSQLServer
from tests.services.server import running

#: What a server has acknowledged must be there after SIGKILL; on PostgreSQL it is in any case.
_SERVERS: dict[str, Any] = {
    "mariadb": (MariaDBServer, {"innodb_flush_log_at_trx_commit": "2", "innodb_doublewrite": "1"}),
    "postgresql": (PostgreSQLServer, {}),
}
_BACKENDS = {"mariadb": "mysql", "postgresql": "postgresql"}


class Node(Protocol):
    """A node of shards that can be killed and started again."""

    def kill(self) -> None: ...
    def start(self) -> None: ...


class Files:
    """A node on SQLite. A file that is moved away stays open in other processes, so its tables are.

    :param tables: what the names of the tables begin with.
    """

    def __init__(self, folder: Path, tables: str) -> None:
        self._folder = folder
        self._tables = tables

    def kill(self) -> None:
        self._rename(self._tables, f"away_{self._tables}")

    def start(self) -> None:
        self._rename(f"away_{self._tables}", self._tables)

    def _rename(self, old: str, new: str) -> None:
        for path in sorted(self._folder.iterdir()):
            if path.name.endswith("-journal"):
                continue  # that of another process, whose transaction is under way
            with closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as connection:
                connection.execute("BEGIN EXCLUSIVE")
                names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
                for (name,) in names.fetchall():
                    if name.startswith(old):
                        renamed = new + name.removeprefix(old)
                        connection.execute(f"ALTER TABLE {name} RENAME TO {renamed}")
                connection.execute("COMMIT")


@contextmanager
def mortal_site(backend: str, folder: Path, **more_options: str) -> Iterator[tuple[Site, Node]]:
    """A site of entities, and its node ``db2``. The global databases are on the other node.

    :param more_options: options of the servers.
    """
    with mortal_site_of(Site, "feeds_", backend, folder, **more_options) as site_and_node:
        yield site_and_node


@contextmanager
def mortal_site_of(
    kind: type[S], tables: str, backend: str, folder: Path, **more_options: str
) -> Iterator[tuple[S, Node]]:
    """A site of the class ``kind``, and its node ``db2``, as :func:`mortal_site`.

    :param tables: what the names of the tables on the shards begin with.
    """
    if backend == "sqlite":
        site = kind(folder)
        set_up_once(site, site.prepare)
        yield site, Files(folder / "db2", tables)
        return
    server_class, options = _SERVERS[backend]
    prefix = f"i{secrets.token_hex(4)}_"
    try:
        with running(server_class, 2, **options, **more_options) as servers:
            addresses = [server.address.django() for server in servers]
            if backend == "postgresql":
                addresses = [{**address, "NAME": f"{prefix}node"} for address in addresses]
            site = kind(folder, addresses, prefix, _BACKENDS[backend])
            site.prepare()
            yield site, servers[1]
    except ServiceMissing as exc:
        service_missing(exc)
