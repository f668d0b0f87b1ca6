"""Processes write and read while keys and shards move, and processes, servers and networks break.

Every acknowledged write is there once, on the shard of its key, on the node of that shard. Whoever
reads sees what was acknowledged before. One command mends what a broken mover has left.

``STORM_SECONDS`` and ``STORM_SEED`` in the environment change the length of the long storms, and
repeat one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import service_missing
from tests.integration.storm.conductor import Conductor, compare
from tests.integration.storm.site import DatabaseServer, StormSite
from tests.services import ServiceMissing
from tests.services.mariadb import MariaDBServer
from tests.services.memcached import MemcachedServer
from tests.services.postgresql import PostgreSQLServer
from tests.services.proxy import Proxy
from tests.services.server import running

SHORT, LONG = 15.0, 180.0
_MOST_REPAIRS = 3
#: What a server has acknowledged must be there after SIGKILL.
_DURABLE: dict[str, str | None] = {
    "innodb_flush_log_at_trx_commit": "2",
    "innodb_doublewrite": "1",
}


_BACKENDS = {"sqlite": "sqlite3", "mariadb": "mysql", "postgresql": "postgresql"}
#: What a PostgreSQL server has acknowledged is there after SIGKILL in any case.
_SERVERS: dict[str, Any] = {
    "mariadb": (MariaDBServer, _DURABLE),
    "postgresql": (PostgreSQLServer, {}),
}


@pytest.fixture(scope="module")
def own_servers() -> Iterator[Callable[[str, int], list[DatabaseServer]]]:
    """A function that returns as many servers of a kind, which a test may kill."""
    started: dict[str, list[DatabaseServer]] = {}
    with ExitStack() as stack:

        def first(kind: str, count: int) -> list[DatabaseServer]:
            servers = started.setdefault(kind, [])
            missing = count - len(servers)
            server_class, options = _SERVERS[kind]
            try:
                if missing > 0:
                    servers.extend(stack.enter_context(running(server_class, missing, **options)))
            except ServiceMissing as exc:
                service_missing(exc)
            return servers[:count]

        yield first


class Weather:
    """A site, and the servers on which it is."""

    def __init__(
        self, site: StormSite, servers: list[DatabaseServer], proxies: list[Proxy]
    ) -> None:
        self.site, self.servers, self.proxies = site, servers, proxies


@pytest.fixture(
    params=[
        ("sqlite", 0),
        ("mariadb", 2),
        pytest.param(("mariadb", 3), marks=pytest.mark.long),
        pytest.param(("postgresql", 2), marks=pytest.mark.long),
    ],
    ids=["sqlite", "mariadb", "mariadb-three", "postgresql"],
)
def weather(
    request: pytest.FixtureRequest, tmp_path: Path, memcached: MemcachedServer
) -> Iterator[Weather]:
    kind, count = request.param
    folder = tmp_path / "site"
    folder.mkdir()
    with ExitStack() as stack:
        servers: list[DatabaseServer] = []
        proxies: list[Proxy] = []
        nodes: list[dict[str, Any]] = []
        prefix = ""
        if count:
            prefix = f"s{secrets.token_hex(4)}_"
            servers = request.getfixturevalue("own_servers")(kind, count)
            for server in servers:
                proxy = stack.enter_context(Proxy(server.address.host, server.address.port))
                proxies.append(proxy)
                nodes.append(server.address.django() | {"HOST": proxy.host, "PORT": proxy.port})
                if kind == "postgresql":
                    nodes[-1]["NAME"] = f"{prefix}node"
        site = StormSite(folder, nodes, prefix, _BACKENDS[kind])
        site.servers = servers
        site.set_up({**memcached.django(), "KEY_PREFIX": secrets.token_hex(4)})
        yield Weather(site, servers, proxies)


def storm(weather: Weather, folder: Path, seconds: float, processes: int, outages: bool) -> None:
    seed = int(os.environ.get("STORM_SEED", secrets.randbelow(10**6)))
    print(f"STORM_SEED={seed}")
    ledgers_folder = folder / "ledgers"
    ledgers_folder.mkdir()
    site = weather.site
    conductor = Conductor(
        site, ledgers_folder, seed, processes=processes,
        servers=weather.servers, proxies=weather.proxies, outages=outages,
    )  # fmt: skip
    try:
        conductor.run(seconds)
        ledgers = conductor.finish()
    finally:
        conductor.abandon()
    print(dict(sorted(conductor.counts.items())))
    print(dict(sorted(ledgers.counts.items())))
    assert not conductor.problems, "\n".join(conductor.problems[:20])
    mend(site)
    assert compare(site, ledgers) == []
    site.manage("keys", "verify", "books", *map(str, range(1, 9)))
    site.manage("shards", "check")
    assert ledgers.counts["read read_all"] and ledgers.counts["create topic: done"]


def mend(site: StormSite) -> None:
    """Have the commands mend what is left. One call each is enough, unless it tells what stays."""
    reports: list[str] = []
    for _ in range(_MOST_REPAIRS):
        for arguments in (
            ("shards", "move", "books", "--cleanup"),
            ("shards", "move", "accounts", "--cleanup"),
            ("keys", "repair", "books"),
        ):
            done = site.python("manage.py", *arguments)
            assert done.code == 0, (arguments, done.out, done.err)
            reports.append(f"{arguments}: {done.out}{done.err}")
        left = site.left() if site.servers else ""
        if not left:
            return
        # The server may not have noticed yet that a process has ended.
        assert "later" in "".join(reports[-3:]), (left, reports)
    raise AssertionError((left, reports))


def test_a_short_storm(weather: Weather, tmp_path: Path) -> None:
    storm(weather, tmp_path, SHORT, 4, outages=False)


@pytest.mark.long
@pytest.mark.parametrize("outages", [False, True], ids=["processes", "servers"])
def test_a_storm(weather: Weather, tmp_path: Path, outages: bool) -> None:
    if outages and not weather.servers:
        pytest.skip("SQLite has no servers")
    storm(weather, tmp_path, float(os.environ.get("STORM_SECONDS", LONG)), 8, outages)
