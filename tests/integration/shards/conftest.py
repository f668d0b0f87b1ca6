"""A fleet of shards on two nodes, and the command line of its operator."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.conftest import service_missing
from tests.integration.shards.project import SETTINGS, prepare
from tests.patience import PATIENCE
from tests.prepared_process import prepared_by
from tests.python_process import run_python
from tests.services import ServiceMissing, mariadb, postgresql
from tests.services.mariadb import MariaDBServer
from tests.services.postgresql import PostgreSQLServer

ROOT = Path(__file__).parents[3]
GROUPS = {"photos": 8, "events": 2, "archive": 2, "pins": 4, "visits": 2}
WIDTH = 100


@dataclass
class Run:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.out.splitlines()]

    def row(self, *cells: str) -> list[str]:
        """Return the line of a table that begins with ``cells``."""
        (line,) = (line for line in self.lines if line[: len(cells)] == list(cells))
        return line


@dataclass
class Fleet:
    """A fleet on SQLite."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    prefix: str = ""
    vendor: str = "sqlite"

    def python(self, *command: str, given: str = "", **environment: str) -> Run:
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith(("DJANGO_", "PYTEST_"))
        }
        variables = {
            **inherited,
            "FLEET_FOLDER": str(self.folder),
            "DJANGO_SETTINGS_MODULE": SETTINGS,
            "FLEET_PREFIX": self.prefix,
            "COLUMNS": "80",
            **self.environment,
            **environment,
        }
        prepared = None
        # A process with other settings has other apps.
        if variables["DJANGO_SETTINGS_MODULE"] == SETTINGS:
            command = ("-m", "tests.integration.shards.project", *command)
            prepared = prepared_by(prepare, variables.get("FLEET_APPS", ""))
        done = run_python(
            command, cwd=ROOT, env=variables, input=given, timeout=PATIENCE, prepared=prepared
        )
        return Run(done.returncode, done.stdout, done.stderr)

    def shards(self, *arguments: str, code: int = 0, given: str = "", **environment: str) -> Run:
        """Run ``manage.py shards …``; it must exit with the status ``code``."""
        run = self.python("-m", "django", "shards", *arguments, given=given, **environment)
        assert run.code == code, f"{run.code}\n{run.out}\n{run.err}"
        assert "Traceback" not in run.err, run.err
        return run

    def json(self, *arguments: str, code: int = 0, **environment: str) -> Any:
        return json.loads(self.shards(*arguments, "--json", code=code, **environment).out)

    @contextmanager
    def unreachable(self, alias: str) -> Iterator[Path]:
        """Replace the file of a database that is not sharded by a folder, which nobody can open."""
        file = self.folder / f"{alias}.sqlite3"
        away = file.rename(file.with_suffix(".away"))
        file.mkdir()
        try:
            yield file
        finally:
            file.rmdir()
            away.rename(file)

    # ##### Access without the library #####

    def node_of(self, group: str, number: int) -> str:
        return "one" if number < GROUPS[group] // 2 else "two"

    def schema(self, group: str, number: int) -> str:
        return f"{self.prefix}{group}_{number:03d}"

    def path(self, group: str, number: int, node: str = "") -> Path:
        folder = self.folder / (node or self.node_of(group, number))
        return folder / f"{self.schema(group, number)}.sqlite3"

    def sql(self, group: str, number: int, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements in a shard and return the rows of the last one."""
        with sqlite3.connect(self.path(group, number)) as connection:
            for statement in statements:
                rows = connection.execute(statement).fetchall()
        connection.close()
        return rows

    def drop(self, group: str, number: int) -> None:
        self.path(group, number).unlink()

    def make(self, group: str, number: int, node: str) -> None:
        """Create a schema on a node where it does not belong."""
        self.path(group, number, node).touch()

    def unmake(self, group: str, number: int, node: str) -> None:
        self.path(group, number, node).unlink()

    def exists(self, group: str, number: int) -> bool:
        return self.path(group, number).exists()

    def global_sql(self, *statements: str) -> None:
        """Run statements in the global database."""
        with sqlite3.connect(self.folder / "default.sqlite3") as connection:
            for statement in statements:
                connection.execute(statement)
        connection.close()

    def place(self, key: int, number: int) -> None:
        """Put a key of ``photos`` into the directory."""
        with sqlite3.connect(self.folder / "directory.sqlite3") as connection:
            connection.execute(
                "INSERT INTO sharded_orm_directory (\"group\", \"key\", shard, placed_at)"
                " VALUES ('photos', ?, ?, '2026-01-01')", [str(key), number],
            )  # fmt: skip
        connection.close()

    def forget(self, key: int) -> None:
        with sqlite3.connect(self.folder / "directory.sqlite3") as connection:
            connection.execute("DELETE FROM sharded_orm_directory WHERE key = ?", [str(key)])
        connection.close()


@dataclass
class ServerFleet(Fleet):
    """A fleet on two servers."""

    nodes: dict[str, Any] = field(default_factory=dict)

    def on(self, node: str, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements on a node and return the rows of the last one."""
        raise NotImplementedError

    def schemas(self, node: str) -> list[str]:
        """Return the schemas of the fleet on a node."""
        raise NotImplementedError

    def drop(self, group: str, number: int) -> None:
        self.unmake(group, number, self.node_of(group, number))

    def exists(self, group: str, number: int) -> bool:
        return self.schema(group, number) in self.schemas(self.node_of(group, number))


@dataclass
class MariaDBFleet(ServerFleet):
    nodes: dict[str, mariadb.Address] = field(default_factory=dict)
    vendor: str = "mysql"

    def on(self, node: str, *statements: str) -> list[tuple[Any, ...]]:
        import MySQLdb

        connection = MySQLdb.connect(**self.nodes[node].mysqldb(), autocommit=True)
        try:
            with connection.cursor() as cursor:
                for statement in statements:
                    cursor.execute(statement)
                return list(cursor.fetchall())
        finally:
            connection.close()

    def sql(self, group: str, number: int, *statements: str) -> list[tuple[Any, ...]]:
        use = f"USE `{self.schema(group, number)}`"
        return self.on(self.node_of(group, number), use, *statements)

    def make(self, group: str, number: int, node: str) -> None:
        self.on(node, f"CREATE DATABASE `{self.schema(group, number)}`")

    def unmake(self, group: str, number: int, node: str) -> None:
        self.on(node, f"DROP DATABASE `{self.schema(group, number)}`")

    def schemas(self, node: str) -> list[str]:
        return [name for (name,) in self.on(node, f"SHOW DATABASES LIKE '{self.prefix}%'")]

    @contextmanager
    def packets(self, node: str) -> Iterator[list[str]]:
        """Record the packets of other sessions to the server during the block.

        Statements that open a session are left out.
        """
        packets: list[str] = []
        self.on(node, "SET GLOBAL log_output = 'TABLE'", "TRUNCATE mysql.general_log",
                "SET GLOBAL general_log = 1")  # fmt: skip
        try:
            yield packets
        finally:
            self.on(node, "SET GLOBAL general_log = 0")
        log = "SELECT CONVERT(argument USING utf8mb4) FROM mysql.general_log"
        packets += [
            sql.strip()
            for (sql,) in self.on(node, f"{log} WHERE command_type = 'Query'")
            if not sql.startswith(("SET ", "SELECT VERSION()"))
        ]


@dataclass
class PostgreSQLFleet(ServerFleet):
    nodes: dict[str, postgresql.Address] = field(default_factory=dict)
    vendor: str = "postgresql"

    def on(self, node: str, *statements: str) -> list[tuple[Any, ...]]:
        import psycopg

        where = self.nodes[node].psycopg(postgresql.DATABASE)
        with closing(psycopg.connect(**where, autocommit=True)) as connection:
            for statement in statements:
                done = connection.execute(statement)
            return done.fetchall() if done.description else []

    def sql(self, group: str, number: int, *statements: str) -> list[tuple[Any, ...]]:
        path = f'SET search_path TO "{self.schema(group, number)}"'
        return self.on(self.node_of(group, number), path, *statements)

    def make(self, group: str, number: int, node: str) -> None:
        self.on(node, f'CREATE SCHEMA "{self.schema(group, number)}"')

    def unmake(self, group: str, number: int, node: str) -> None:
        self.on(node, f'DROP SCHEMA "{self.schema(group, number)}" CASCADE')

    def schemas(self, node: str) -> list[str]:
        ours = f"SELECT nspname FROM pg_namespace WHERE nspname ^@ '{self.prefix}'"
        return [name for (name,) in self.on(node, ours)]


def _postgresql(folder: Path, one: postgresql.Address, two: postgresql.Address) -> PostgreSQLFleet:
    nodes = {"one": one, "two": two}
    settings = {name: address.node() for name, address in nodes.items()}
    return PostgreSQLFleet(
        folder,
        {"FLEET_NODES": json.dumps(settings)},
        prefix=f"fleet_{secrets.token_hex(4)}_",
        nodes=nodes,
    )


def _mysql(folder: Path, one: mariadb.Address, two: mariadb.Address) -> MariaDBFleet:
    options = {"ENGINE": "sharded_orm.backends.mysql", "OPTIONS": {"charset": "utf8mb4"}}
    nodes = {"one": one, "two": two}
    settings = {name: {**options, **address.django()} for name, address in nodes.items()}
    return MariaDBFleet(
        folder,
        {"FLEET_NODES": json.dumps(settings)},
        prefix=f"fleet_{secrets.token_hex(4)}_",
        nodes=nodes,
    )


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated fleet on SQLite, to be copied."""
    template = Fleet(tmp_path_factory.mktemp("template"))
    done = template.python("-m", "tests.integration.shards.populate")
    assert done.code == 0, done.err
    return template.folder


@pytest.fixture(scope="session")
def own_mariadb() -> Iterator[MariaDBServer]:
    """A MariaDB server of the tests of this folder. A test that stops it starts it again."""
    try:
        with MariaDBServer() as server:
            yield server
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture(scope="session")
def own_postgresql() -> Iterator[PostgreSQLServer]:
    """A PostgreSQL server of the tests of this folder. A test that stops it starts it again."""
    try:
        with PostgreSQLServer() as server:
            yield server
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture(scope="session")
def mysql_fleet(
    tmp_path_factory: pytest.TempPathFactory,
    mariadb: mariadb.Address,
    own_mariadb: MariaDBServer,
) -> Iterator[MariaDBFleet]:
    """A migrated fleet on two servers, one for the node "two". All modules share it: leave it unchanged."""
    with _migrated(_mysql(tmp_path_factory.mktemp("fleet"), mariadb, own_mariadb.address)) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def postgresql_fleet(
    tmp_path_factory: pytest.TempPathFactory,
    postgresql: postgresql.Address,
    own_postgresql: PostgreSQLServer,
) -> Iterator[PostgreSQLFleet]:
    """A migrated fleet on two servers, one for the node "two". All modules share it: leave it unchanged."""
    folder = tmp_path_factory.mktemp("fleet")
    with _migrated(_postgresql(folder, postgresql, own_postgresql.address)) as fleet:
        yield fleet


AnyFleet = TypeVar("AnyFleet", bound=ServerFleet)


@contextmanager
def _migrated(fleet: AnyFleet) -> Iterator[AnyFleet]:
    try:
        done = fleet.python("-m", "tests.integration.shards.populate")
        assert done.code == 0, done.err
        yield fleet
    finally:
        for node in fleet.nodes:
            for name in fleet.schemas(node):
                kind = "DATABASE" if fleet.vendor == "mysql" else "SCHEMA"
                fleet.on(node, f"DROP {kind} {name}{'' if kind == 'DATABASE' else ' CASCADE'}")


@pytest.fixture(scope="session", params=["sqlite", "mysql", "postgresql"])
def relatives_fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """A migrated fleet with the models of ``tests.relatives``."""
    folder = tmp_path_factory.mktemp("relatives")
    apps = {"FLEET_APPS": "tests.relatives.plain tests.relatives.sharded"}
    if request.param != "sqlite":
        make, service = {
            "mysql": (_mysql, "mariadb"),
            "postgresql": (_postgresql, "postgresql"),
        }[request.param]
        two = request.getfixturevalue(f"own_{service}").address
        fleet: ServerFleet = make(folder, request.getfixturevalue(service), two)
        fleet.environment |= apps
        with _migrated(fleet) as migrated:
            yield migrated
        return
    done = Fleet(folder, apps).python("-m", "tests.integration.shards.populate")
    assert done.code == 0, done.err
    yield Fleet(folder, apps)


@pytest.fixture
def sqlite_fleet(sqlite_template: Path, tmp_path: Path) -> Fleet:
    """A migrated fleet of the test's own."""
    folder = tmp_path / "fleet"
    shutil.copytree(sqlite_template, folder)
    return Fleet(folder)


@pytest.fixture(scope="session")
def authors_template(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """A migrated fleet on SQLite with the models of ``tests.authors``, to be copied."""
    template = Fleet(tmp_path_factory.mktemp("authors"), {"FLEET_APPS": "tests.authors"})
    done = template.python("-m", "tests.integration.shards.populate")
    assert done.code == 0, done.err
    return template


@pytest.fixture
def authors_fleet(authors_template: Fleet, tmp_path: Path) -> Fleet:
    folder = tmp_path / "authors"
    shutil.copytree(authors_template.folder, folder)
    return Fleet(folder, authors_template.environment)


@pytest.fixture(params=["sqlite", "mysql", "postgresql"])
def fleet(request: pytest.FixtureRequest) -> Fleet:
    """A migrated fleet. Tests must leave it unchanged."""
    fleet: Fleet = request.getfixturevalue(f"{request.param}_fleet")
    return fleet


@pytest.fixture
def healthy(fleet: Fleet) -> Iterator[Fleet]:
    """The fleet; a test must repair its changes at the end."""
    yield fleet
    fleet.shards("check", "--all")


#: Checks all rows of one shard; prints a figure of the report and the number of statements about a table.
_COUNTING = """
import django
django.setup()
from django.db.backends.signals import connection_created

from sharded_orm import runtime
from sharded_orm.operations.shards.health import check

asked = []

def count(execute, sql, params, many, context):
    if {table!r} in sql:
        asked.append(sql)
    return execute(sql, params, many, context)

# Of every thread.
def watch(connection, **kwargs):
    if count not in connection.execute_wrappers:
        connection.execute_wrappers.append(count)

connection_created.connect(watch)
report = check([runtime.shard("photos", {shard})], sample=None)
print({figure}, len(asked))
"""


def check_and_count(fleet: Fleet, shard: int, figure: str, table: str) -> Any:
    """Check all rows of one shard of ``photos`` in a process, and return how the process ended.

    It prints ``figure``, an expression about ``report``, and the number of statements that name
    ``table``.
    """
    return fleet.python("-c", _COUNTING.format(shard=shard, figure=figure, table=table))
