"""A group that grows on MariaDB and on PostgreSQL."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

import MySQLdb
import psycopg
import pytest

from tests.integration.growth.site import Site
from tests.services import mariadb
from tests.services.postgresql import DATABASE, Address


def _drop_on_mariadb(address: mariadb.Address, prefix: str) -> None:
    connection = MySQLdb.connect(**address.mysqldb(), autocommit=True)
    with contextlib.closing(connection), connection.cursor() as cursor:
        cursor.execute("SHOW DATABASES LIKE %s", (f"{prefix}%",))
        for (name,) in cursor.fetchall():
            cursor.execute(f"DROP DATABASE `{name}`")


def _drop_on_postgresql(address: Address, prefix: str) -> None:
    connection = psycopg.connect(**address.psycopg(DATABASE), autocommit=True)
    with contextlib.closing(connection):
        ours = "SELECT nspname FROM pg_namespace WHERE nspname ^@ %s"
        for (name,) in connection.execute(ours, (prefix,)).fetchall():
            connection.execute(f"DROP SCHEMA {name} CASCADE")


@pytest.fixture(params=["mariadb", "postgresql"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    prefix = f"grow_{secrets.token_hex(4)}_"
    addresses = request.getfixturevalue(f"{request.param}_nodes")[:2]
    on_mariadb = request.param == "mariadb"
    settings = (
        {"ENGINE": "sharded_orm.backends.mysql", **address.django()}
        if on_mariadb
        else address.node()
        for address in addresses
    )
    nodes = dict(zip(("one", "two"), settings, strict=True))
    yield Site(tmp_path, "range", nodes, prefix, BOUNDS=[0, 1000])
    for address in addresses:
        (_drop_on_mariadb if on_mariadb else _drop_on_postgresql)(address, prefix)


def test_bounds_and_a_kill(site: Site) -> None:
    site.run("answer = [Entry(entry_id=n, user_id=n).save() for n in (1, 1500)]")
    error = site.grow("--bounds", "1500", "3000", code=1).err
    assert "must lie above every key in use" in error
    site.grow_and_die("after:migrate:1", "--bounds", "1501", "3000")
    assert len(site.ranges()) == 1
    site.grow("--bounds", "1501", "3000")
    assert [each["range"] for each in site.ranges()] == [[0, 1], [2, 3]]
    assert site.run(
        "Entry(entry_id=2500, user_id=2500).save()\n"
        "answer = [Entry.objects.get(user_id=n)._state.db for n in (1, 1500, 2500)]"
    ) == ["photos_00000", "photos_00001", "photos_00002"]
