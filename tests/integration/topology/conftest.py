"""Sites with each topology source, and nodes of each backend."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient

from sharded_orm.topology.sources.database_tables import VERSIONS
from tests.conftest import service_missing
from tests.integration.topology.site import SHARDS, Site, document
from tests.services import ServiceMissing, postgresql
from tests.services.mariadb import Address
from tests.services.zookeeper import ZooKeeperServer

TABLE = "CREATE TABLE places_place (place_id BIGINT PRIMARY KEY, user_id BIGINT, node VARCHAR(50))"


@pytest.fixture(scope="module")
def zookeeper() -> Iterator[ZooKeeperServer]:
    """A ZooKeeper for the module. A test that kills it starts it again."""
    try:
        with ZooKeeperServer() as server:
            yield server
    except ServiceMissing as exc:
        service_missing(exc)


def make_file(path: Path, node: str, number: int) -> None:
    """Create the shard ``number`` as an SQLite file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path)
    connection.execute(TABLE)
    connection.execute("INSERT INTO places_place VALUES (?, ?, ?)", (number, number, node))
    connection.commit()
    connection.close()


@pytest.fixture
def sqlite_nodes(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Nodes ``one`` and ``two``, each with all the shards; the rows name their node."""
    nodes = {}
    for node in ("one", "two"):
        for number in range(SHARDS):
            make_file(tmp_path / node / f"photos_{number:05d}.sqlite3", node, number)
        nodes[node] = {"ENGINE": "sharded_orm.backends.sqlite3", "NAME": str(tmp_path / node)}
    return nodes


@pytest.fixture
def mysql_nodes(mariadb_nodes: list[Address]) -> Iterator[dict[str, dict[str, Any]]]:
    """Nodes ``one`` and ``two`` on two MariaDB servers."""
    MySQLdb = pytest.importorskip("MySQLdb")
    nodes = {}
    schemas = [f"moved_{number:05d}" for number in range(SHARDS)]

    def drop(cursor: Any) -> None:
        for schema in schemas:
            cursor.execute(f"DROP DATABASE IF EXISTS {schema}")

    opened = [
        MySQLdb.connect(**address.mysqldb(), autocommit=True) for address in mariadb_nodes[:2]
    ]
    for node, address, connection in zip(("one", "two"), mariadb_nodes, opened, strict=False):
        with connection.cursor() as cursor:
            drop(cursor)
            for number, schema in enumerate(schemas):
                cursor.execute(f"CREATE DATABASE {schema}")
                cursor.execute(TABLE.replace("places_place", f"{schema}.places_place"))
                cursor.execute(
                    f"INSERT INTO {schema}.places_place VALUES (%s, %s, %s)", (number, number, node)
                )
        nodes[node] = {"ENGINE": "sharded_orm.backends.mysql", **address.django()}
    yield nodes
    for connection in opened:
        with connection.cursor() as cursor:
            drop(cursor)
        connection.close()


@pytest.fixture
def postgres_nodes(
    postgresql_nodes: list[postgresql.Address],
) -> Iterator[dict[str, dict[str, Any]]]:
    """Nodes ``one`` and ``two`` on two PostgreSQL servers."""
    psycopg = pytest.importorskip("psycopg")
    schemas = [f"moved_{number:05d}" for number in range(SHARDS)]
    addresses = dict(zip(("one", "two"), postgresql_nodes, strict=False))

    def drop(connection: Any) -> None:
        for schema in schemas:
            connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")

    with ExitStack() as stack:
        for node, address in addresses.items():
            where = address.psycopg(postgresql.DATABASE)
            connection = stack.enter_context(closing(psycopg.connect(**where, autocommit=True)))
            drop(connection)
            stack.callback(drop, connection)
            for number, schema in enumerate(schemas):
                connection.execute(f"CREATE SCHEMA {schema}; SET search_path TO {schema}; {TABLE}")
                row = (number, number, node)
                connection.execute("INSERT INTO places_place VALUES (%s, %s, %s)", row)
        yield {node: address.node() for node, address in addresses.items()}


@dataclass
class PublishedSite(Site):
    """A site whose topology is published by commands, where no document exists yet."""

    def hold(self, text: str) -> None:
        """Write ``text`` into the source, as somebody may do without the commands."""
        raise NotImplementedError

    def writes(self) -> int:
        """Return a number that changes if the source is written."""
        raise NotImplementedError


class ZooKeeperSite(PublishedSite):
    @contextmanager
    def client(self) -> Iterator[KazooClient]:
        client = KazooClient(self.source["OPTIONS"]["HOSTS"])
        client.start()
        yield client
        client.stop()
        client.close()

    @property
    def path(self) -> str:
        return f"{self.source['OPTIONS']['PATH']}/current"

    def hold(self, text: str) -> None:
        with self.client() as client:
            client.set(self.path, text.encode())

    def writes(self) -> int:
        with self.client() as client:
            return int(client.get(self.path)[1].version)


class DatabaseSite(PublishedSite):
    """A site with its topology in the global database, a file of SQLite."""

    def sql(self, statement: str, *parameters: Any) -> list[Any]:
        connection = sqlite3.connect(self.folder / "default.sqlite3")
        try:
            with connection:
                return connection.execute(statement, parameters).fetchall()
        finally:
            connection.close()

    def hold(self, text: str) -> None:
        self.sql(
            f"INSERT INTO {VERSIONS} SELECT MAX(id) + 1, 0, '', '[\"\", \"\"]', ? FROM {VERSIONS}",
            text,
        )

    def writes(self) -> int:
        ((newest,),) = self.sql(f"SELECT MAX(id) FROM {VERSIONS}")
        return int(newest)


@pytest.fixture(params=["zookeeper", "database"])
def published(
    request: pytest.FixtureRequest, tmp_path: Path, sqlite_nodes: dict[str, dict[str, Any]]
) -> PublishedSite:
    if request.param == "database":
        return site_with_database(tmp_path, sqlite_nodes)
    return site_with_zookeeper(tmp_path, sqlite_nodes, request.getfixturevalue("zookeeper").hosts)


def site_with_database(
    folder: Path, nodes: dict[str, dict[str, Any]], **options: Any
) -> DatabaseSite:
    source_options = {
        "INTERVAL": 0.05, "LAST_GOOD": str(folder / "last_good/topology.json"), **options,
    }  # fmt: skip
    return DatabaseSite(folder, nodes, {"SOURCE": "database", "OPTIONS": source_options})


@pytest.fixture
def file_site(tmp_path: Path, sqlite_nodes: dict[str, dict[str, Any]]) -> Site:
    """A site with its topology in a file, at version 1."""
    return site_with_file(tmp_path, sqlite_nodes)


def site_with_file(folder: Path, nodes: dict[str, dict[str, Any]], **more: Any) -> Site:
    path = folder / "topology.json"
    path.write_text(json.dumps(document(1)))
    options = {"PATH": str(path), "INTERVAL": 0.02, "LAST_GOOD": str(folder / "last_good/topology.json")}  # fmt: skip
    return Site(folder, nodes, {"SOURCE": "file", "OPTIONS": options}, **more)


@pytest.fixture
def zk_site(
    tmp_path: Path, sqlite_nodes: dict[str, dict[str, Any]], zookeeper: ZooKeeperServer
) -> Site:
    """A site with its topology in ZooKeeper, where no document exists yet."""
    return site_with_zookeeper(tmp_path, sqlite_nodes, zookeeper.hosts)


def site_with_zookeeper(
    folder: Path, nodes: dict[str, dict[str, Any]], hosts: str, **options: Any
) -> ZooKeeperSite:
    source_options = {
        "HOSTS": hosts,
        # Each test has a tree of its own.
        "PATH": f"/{folder.name}",
        "LAST_GOOD": str(folder / "last_good/topology.json"),
        "TIMEOUT": 2.0,
        "WAIT": 20.0,
        **options,
    }
    return ZooKeeperSite(folder, nodes, {"SOURCE": "zookeeper", "OPTIONS": source_options})
