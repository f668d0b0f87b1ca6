"""The fleet pages over MariaDB, where nodes have passwords and connections, and go down."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sharded_orm.operations import nodes
from tests.admin.fleet.site import FIND, MAP, RUNS, TICKETS, TOPOLOGY, Site, serving
from tests.integration.shards.conftest import MariaDBFleet
from tests.services.mariadb import USER, MariaDBServer

#: Seconds that the driver waits for a silent server. A page waits far less, also on a busy machine:
#: three seconds for states, one for each further question.
DRIVER_WAITS = 60
EVERY_PAGE = [
    "/admin/",
    MAP,
    f"{MAP}?size=rows",
    f"{MAP}shard/photos_00003/",
    f"{MAP}shard/photos_00006/",
    f"{MAP}range/photos/0-7/",
    f"{FIND}?model=Photo&value=1",
    TICKETS,
    RUNS,
    f"{RUNS}1/change/",
    TOPOLOGY,
    f"{TOPOLOGY}0/change/",
]
#: The pages that query a server, each in another way.
SLOW = [MAP, f"{MAP}shard/photos_00006/", f"{FIND}?model=Photo&value=1", TICKETS]


@pytest.fixture(scope="module")
def on_servers(mysql_fleet: MariaDBFleet) -> Iterator[Site]:
    """A fleet whose node "two" is a server of its own, with the directory and one ticket server."""
    databases = {
        alias: {
            "ENGINE": "django.db.backends.mysql",
            "NAME": alias,
            "OPTIONS": {"charset": "utf8mb4", "connect_timeout": DRIVER_WAITS},
            **mysql_fleet.nodes["two"].django(),
        }
        for alias in ("directory", "tickets_2")
    }
    nodes = json.loads(mysql_fleet.environment["FLEET_NODES"])
    for node in nodes.values():
        node["OPTIONS"]["connect_timeout"] = DRIVER_WAITS
    mysql_fleet.on("two", *(f"CREATE DATABASE {alias}" for alias in databases))
    environment = {"FLEET_DATABASES": json.dumps(databases), "FLEET_NODES": json.dumps(nodes)}
    with serving(mysql_fleet, **environment) as site:
        site.run(
            "from django.core.management import call_command\n"
            "call_command('tickets', 'create', verbosity=0)"
        )
        yield site


@pytest.fixture(scope="module")
def passwords(mysql_fleet: MariaDBFleet) -> set[str]:
    return {address.password for address in mysql_fleet.nodes.values()}


def without_credentials(body: str, passwords: set[str]) -> bool:
    return all(password not in body for password in passwords) and USER not in body


def test_all_is_told_and_no_credential(on_servers: Site, passwords: set[str]) -> None:
    for path in EVERY_PAGE:
        page = on_servers.get(path)
        assert page.status == 200, path
        assert without_credentials(page.body, passwords), path
    page = on_servers.get(MAP)
    assert len(page.cells("current")) == 18
    assert re.search(r"two 127\.0\.0\.1:\d+ ✓? ?answers", page.text)
    assert "about" in page.cells("current")[0]


def test_a_shard_tells_tables_and_connections(on_servers: Site, mysql_fleet: MariaDBFleet) -> None:
    mysql_fleet.sql("photos", 6, "ANALYZE TABLE photos_app_photo")
    page = on_servers.get(f"{MAP}shard/photos_00006/")
    assert re.search(r"photos_app_photo about 0 \d+\.0 KB", page.text.replace("\xa0", " "))
    process, idle, server = map(
        int,
        re.search(
            r"Of this process (\d+) open, (\d+) of them idle Of the server (\d+)", page.text
        ).groups(),  # type: ignore[union-attr]  # fails the test if it is None
    )
    assert 0 < process <= server and idle <= process


def test_the_map_costs_a_few_statements_of_each_node(
    on_servers: Site, mysql_fleet: MariaDBFleet
) -> None:
    with mysql_fleet.packets("two") as states:
        on_servers.get(f"{MAP}?group=photos&size=same")
    # The schemas, the migrations of four shards, and those that one of them lacks: the node that
    # answers first is queried for these.
    assert 2 <= len(states) <= 8, states
    assert not [sql for sql in states if "SUM(data_length" in sql]
    with mysql_fleet.packets("two") as with_sizes:
        on_servers.get(f"{MAP}?group=photos&size=bytes")
    assert sum("SUM(data_length" in sql for sql in with_sizes) == 1
    assert len(with_sizes) <= 9, with_sizes


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_node_that_is_down_keeps_no_page_waiting(
    on_servers: Site, own_mariadb: MariaDBServer, passwords: set[str], how: str
) -> None:
    on_servers.get(MAP)  # The first request opens the connections.
    if how == "stopped":
        own_mariadb.pause()
    else:
        own_mariadb.kill()
    try:
        # Each page waits for a stopped node until its deadline.
        for path in EVERY_PAGE if how == "killed" else SLOW:
            page = on_servers.get(path)
            assert page.status == 200, path
            assert page.seconds < DRIVER_WAITS, path
            assert without_credentials(page.body, passwords), path
            if path == MAP:
                assert len(page.cells("down")) == 9
                assert len(page.cells("current")) == 9
                assert "Node 'two' does not answer" in page.text
            if path == f"{MAP}shard/photos_00006/":
                assert "Its node is down" in page.text
            if path == TICKETS:
                assert "tickets_1 State answers" in page.text
                assert "tickets_2 State down" in page.text
            if path.startswith(FIND):
                assert "The directory does not answer" in page.text
            if path == f"{MAP}range/photos/0-7/":
                assert "two is down" in page.text
                assert "photos_00003 one current" in page.text.replace("✓ ", "")
    finally:
        if how == "stopped":
            own_mariadb.resume()
        else:
            own_mariadb.start()
    assert len(on_servers.get(MAP).cells("current")) == 18


def test_a_node_that_hangs_does_not_collect_threads(
    on_servers: Site, own_mariadb: MariaDBServer
) -> None:
    ask = (
        "import threading\n"
        "from sharded_orm.operations.shards.status import status\n"
        "found = [status(within=0.01, sizes=False) for _ in range(30)]\n"
        "result = sum(one.name == 'node two' for one in threading.enumerate())"
    )
    own_mariadb.pause()
    try:
        assert on_servers.run(ask) == nodes.MAX_ABANDONED
        assert "20 earlier questions have no answer yet" in on_servers.get(MAP).text
    finally:
        own_mariadb.resume()
    # The threads end when the node answers.
    on_servers.run(
        "import threading\n"
        "from tests.patience import PATIENCE\n"
        "for one in threading.enumerate():\n"
        "    if one.name == 'node two': one.join(PATIENCE)"
    )
    assert len(on_servers.get(MAP).cells("current")) == 18


def test_an_account_that_is_refused_is_not_named(mysql_fleet: MariaDBFleet) -> None:
    nodes = json.loads(mysql_fleet.environment["FLEET_NODES"])
    nodes["two"] |= {"USER": "somebody_else", "PASSWORD": "recognisable-password"}
    with serving(mysql_fleet, FLEET_NODES=json.dumps(nodes)) as site:
        for path in (MAP, f"{MAP}shard/photos_00006/", f"{MAP}range/photos/4-7/"):
            page = site.get(path)
            assert page.status == 200
            assert "Access denied for this account" in page.text
            assert "somebody_else" not in page.body
            assert "recognisable-password" not in page.body


def test_pages_keep_no_connection_of_their_threads(on_servers: Site) -> None:
    opened = "from sharded_orm.backends.pool import pools; result = [p.size for p in pools()]"
    for _ in range(3):
        on_servers.get(MAP)
    before = on_servers.run(opened)
    for _ in range(5):
        on_servers.get(f"{MAP}shard/photos_00006/")
        on_servers.get(MAP)
    assert max(on_servers.run(opened)) <= max(before) + 2


def test_the_path_of_settings_is_not_shown(on_servers: Site, mysql_fleet: MariaDBFleet) -> None:
    assert str(Path(mysql_fleet.folder)) not in on_servers.get(MAP).body
