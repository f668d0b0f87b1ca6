"""A site with rows in one database, and the commands of its operator."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from types import ModuleType
from typing import Any, ClassVar, TypeVar

import pytest

from tests.integration.imports import project
from tests.integration.imports.stored_sites import set_up_once
from tests.patience import PATIENCE
from tests.prepared_process import prepared_by
from tests.python_process import PythonProcess

ROOT = Path(__file__).parents[3]
SHARDS, WRITERS = 4, 8
BACKENDS = ["sqlite", "mariadb", "postgresql"]
MODELS = ["library.Review", "library.Book", "library.Novel", "library.Topic", "library.Counted"]
#: Runs before the code that a test gives to a process of the site.
PREAMBLE = """
import datetime, json, uuid
from contextlib import contextmanager
from decimal import Decimal
from django.apps import apps
from django.db import connections, models, transaction
from tests.integration.imports.library.models import *
from sharded_orm.models.sharding.options import shard_options

def source(model):
    return models.QuerySet(model, using="default")

def execute(alias, sql, *params):
    with connections[alias].cursor() as cursor:
        cursor.execute(sql, params)
        return cursor.fetchall() if cursor.description else None

@contextmanager
def unchecked(alias):
    # Within the block, foreign keys are not checked.
    if connections[alias].vendor != "postgresql":
        with connections[alias].constraint_checks_disabled():
            yield
        return
    with transaction.atomic(using=alias):
        execute(alias, "SET LOCAL session_replication_role = replica")
        yield

def raw(alias, model):
    columns = ", ".join(f.column for f in model._meta.local_concrete_fields)
    rows = execute(alias, f"SELECT {columns} FROM {model._meta.db_table}")
    return sorted(map(repr, rows))
"""
_CREATE = f"""
from django.db import connection
with connection.schema_editor() as editor:
    for model in (Book, Topic, Review, Novel, Counted, Account, Order, Board, Pin):
        editor.create_model(model)
Writer.objects.bulk_create(Writer(id=n, name=f"w{{n}}") for n in range(1, {WRITERS + 1}))
"""
DEFINITIONS = f"""
moment = datetime.datetime(2020, 3, 4, 5, 6, 7, 890123, tzinfo=datetime.UTC)
def book(pk, **values):
    return {{"id": pk, "writer_id": pk % {WRITERS} + 1, "title": f"book {{pk}}", "changed_at": moment, **values}}
def insert(model, rows):
    query = models.sql.InsertQuery(model)
    fields = [f for f in model._meta.local_concrete_fields]
    from types import SimpleNamespace
    objs = [SimpleNamespace(**{{f.attname: row.get(f.attname) for f in fields}}) for row in rows]
    for obj in objs:
        if getattr(obj, "id", None) == 0:
            obj.id = -5  # MariaDB would count a new number.
    query.insert_values(fields, objs, raw=True)
    with unchecked("default"):
        query.get_compiler("default").execute_sql()
        if any(row.get("id") == 0 for row in rows):
            execute("default", f"UPDATE {{model._meta.db_table}} SET id = 0 WHERE id = -5")
"""


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Site:
    """Groups ``books`` (directory), ``accounts`` (modulo) and ``pins`` (embedded) have four shards on two nodes.

    A third node has none at first. A subclass has the site of another project.

    :cvar project: the module of the processes, with a function ``prepare()``.
    :cvar preamble: runs before the code that a test gives to a process.
    :cvar first_rows: code that runs when the shards have their tables.
    """

    project: ClassVar[ModuleType] = project
    preamble: ClassVar[str] = PREAMBLE
    first_rows: ClassVar[str] = _CREATE

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[dict[str, Any]] = (),
        prefix: str = "",
        backend: str = "sqlite3",
    ) -> None:
        self.folder = folder
        #: The names of all schemas and databases begin with it; "" on SQLite.
        self.prefix = prefix
        self.backend = backend
        engine = f"sharded_orm.backends.{self.backend}"
        options = {"charset": "utf8mb4"} if backend == "mysql" else {}
        self.nodes = dict(
            zip(
                ("db1", "db2", "db3")[: len(nodes) or 2],
                [{"ENGINE": engine, "OPTIONS": options, **node} for node in nodes]
                or [{"ENGINE": engine, "NAME": str(folder / name)} for name in ("db1", "db2")],
                strict=True,
            )
        )
        self.global_aliases = ("default", "directory", "tickets_1", "tickets_2")
        databases = {
            alias: {**self.nodes["db1"], "NAME": f"{prefix}{alias}"}
            if nodes
            else {
                "ENGINE": engine,
                "NAME": str(folder / f"{alias}.sqlite3"),
                "OPTIONS": {"timeout": 60},
            }
            for alias in self.global_aliases
        }
        if not nodes:
            for name, node in self.nodes.items():
                (folder / name).mkdir()
                node["OPTIONS"] = {"timeout": 60}
        self.content: dict[str, Any] = {
            "databases": databases,
            "sharded_orm": {
                "NODES": self.nodes,
                "GROUPS": {
                    name: {
                        "STRATEGY": strategy,
                        "DATABASE_NAME": f"{prefix}{name}_{{shard:05d}}",
                        "RANGES": [
                            {"range": [0, 1], "primary": "db1"},
                            {"range": [2, 3], "primary": "db2"},
                        ],
                    }
                    for name, strategy in (
                        ("books", "directory"),
                        ("accounts", "modulo"),
                        ("pins", "embedded"),
                    )
                },
                "TICKETS": ["tickets_1", "tickets_2"],
                "DIRECTORY": "directory",
                "CACHE": {
                    "OBJECTS": "default",
                    "LISTS": "default",
                    "TIMEOUT": 0.1,
                    "COMMIT_WITHIN": 0.2,
                    "QUARANTINE": 0.5,
                },
            },
        }
        self.save()

    def create_databases(self) -> None:
        """Create the databases of the nodes and of the aliases, on servers that have databases."""
        if self.backend == "mysql":
            import MySQLdb

            for settings in self._databases_on_servers:
                connection = MySQLdb.connect(
                    host=settings["HOST"],
                    port=int(settings["PORT"]),
                    user=settings["USER"],
                    password=settings["PASSWORD"],
                )
                name = settings["NAME"]
                connection.cursor().execute(
                    f"CREATE DATABASE IF NOT EXISTS {name} CHARACTER SET utf8mb4"
                )
                connection.close()
        if self.backend == "postgresql":
            for settings in self._databases_on_servers:
                with administrator(settings) as run:
                    if settings["NAME"] not in postgresql_databases(run, self.prefix):
                        run(f"CREATE DATABASE {settings['NAME']}")

    @property
    def _databases_on_servers(self) -> list[dict[str, Any]]:
        settings = [*self.content["databases"].values(), *self.nodes.values()]
        return [entry for entry in settings if entry.get("NAME")]

    def save(self) -> None:
        self._settings_file.write_text(json.dumps(self.content))

    def prepare(self) -> None:
        self.create_databases()
        for alias in ("default", "directory"):
            self.manage("migrate", "--database", alias, "--verbosity", "0")
        self.manage("tickets", "create")
        self.manage("migrate_shards", "--create", "--verbosity", "0")
        if self.first_rows:
            self.run(self.first_rows)

    def initialize(self) -> None:
        """Do what each site of this class begins with. Done once in a test run, and then copied."""
        self.prepare()

    def lock_early(self, *aliases: str) -> None:
        """On SQLite, let each transaction on shards, and on ``aliases``, lock its file when it begins.

        One that has read must not begin to write later, while others write.
        """
        if self.backend == "sqlite3":
            for entry in (*self.nodes.values(), *(self.content["databases"][a] for a in aliases)):
                entry["OPTIONS"]["transaction_mode"] = "IMMEDIATE"

    @property
    def _settings_file(self) -> Path:
        return self.folder / "settings.json"

    def start(self, *arguments: str, **environment: str) -> PythonProcess:
        return PythonProcess(
            ["-m", self.project.__name__, str(self._settings_file), *arguments],
            cwd=ROOT,
            env={**os.environ, **environment},
            stderr=PIPE,
            prepared=prepared_by(self.project.prepare, *self.content.get("apps", ())),
        )

    def python(self, *arguments: str, **environment: str) -> Done:
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode is not None
        return Done(process.returncode, out, err)

    def manage(self, *arguments: str, code: int = 0, **environment: str) -> Done:
        """Run a command; it must exit with the status ``code``."""
        done = self.python("manage.py", *arguments, **environment)
        assert done.code == code, f"{done.code}\n{done.out}\n{done.err}"
        assert "Traceback" not in done.err, done.err
        return done

    def run(self, code: str, **environment: str) -> str:
        """Run code in a process of the site, and return what it prints."""
        done = self.python("run", self.preamble + code, **environment)
        assert done.code == 0, done.err
        return done.out.strip()

    def fill(self, count: int = 41) -> None:
        self.run(f"{DEFINITIONS}insert(Book, [book(pk) for pk in range(1, {count})])")

    def copy(
        self, *options: str, models: Sequence[str] = MODELS, code: int = 0, **environment: str
    ) -> Done:
        return self.manage(
            "shards", "import", *models, "--from", "default", *options, code=code, **environment
        )

    def ids(self, model: str = "Book") -> list[Any]:
        """The primary keys on all shards, a key twice if two shards have it."""
        found: list[Any] = json.loads(
            self.run(
                f"rows = {model}.objects.scatter().values_list('pk', flat=False)\n"
                "print(json.dumps(sorted(row[0] for row in rows)))"
            )
        )
        return found


@contextmanager
def administrator(settings: dict[str, Any]) -> Iterator[Callable[[str], list[tuple[Any, ...]]]]:
    """A function that runs SQL on the PostgreSQL server of ``settings``, in its own database."""
    import psycopg

    with psycopg.connect(
        host=settings["HOST"],
        port=settings["PORT"],
        user=settings["USER"],
        password=settings["PASSWORD"],
        dbname=settings.get("DATABASE", "postgres"),
        autocommit=True,
    ) as connection:

        def run(sql: str) -> list[tuple[Any, ...]]:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

        yield run


S = TypeVar("S", bound=Site)


def site_fixture(kind: type[S], *, everywhere: bool = False) -> Any:
    """Return a fixture that gives a site of the class ``kind``, on SQLite or, in long runs, on each backend.

    :param everywhere: whether it is on each backend in every run.
    """
    servers = [
        backend if everywhere else pytest.param(backend, marks=pytest.mark.long)
        for backend in BACKENDS[1:]
    ]

    @pytest.fixture(params=[BACKENDS[0], *servers])
    def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[S]:
        with site_on(request.param, request, tmp_path, kind) as site:
            yield site

    return site


@contextmanager
def site_on(
    backend: str, request: pytest.FixtureRequest, folder: Path, kind: type[S]
) -> Iterator[S]:
    """Give a site of the class ``kind`` that is initialized. In the end, its schemas are dropped."""
    with _empty_site_on(backend, request, folder, kind) as site:
        set_up_once(site, site.initialize)
        yield site


@contextmanager
def _empty_site_on(
    backend: str, request: pytest.FixtureRequest, folder: Path, kind: type[S]
) -> Iterator[S]:
    if backend == "sqlite":
        yield kind(folder)
        return
    prefix = f"i{secrets.token_hex(4)}_"
    if backend == "postgresql":
        servers = [a.django() for a in request.getfixturevalue("postgresql_nodes")[:2]]
        try:
            nodes = [{**server, "NAME": f"{prefix}node"} for server in servers]
            yield kind(folder, nodes, prefix, "postgresql")
        finally:
            for server in servers:
                drop_postgresql_databases(server, prefix)
        return
    import MySQLdb

    addresses = request.getfixturevalue("mariadb_nodes")
    try:
        yield kind(folder, [address.django() for address in addresses[:2]], prefix, "mysql")
    finally:
        for address in addresses[:2]:
            connection = MySQLdb.connect(**address.mysqldb(), autocommit=True)
            cursor = connection.cursor()
            cursor.execute(f"SHOW DATABASES LIKE '{prefix}%'")
            for (name,) in cursor.fetchall():
                cursor.execute(f"DROP DATABASE {name}")
            connection.close()


def postgresql_databases(run: Callable[[str], list[tuple[Any, ...]]], prefix: str) -> list[str]:
    """Return the names of the databases that begin with ``prefix``."""
    names = run(f"SELECT datname FROM pg_database WHERE starts_with(datname, '{prefix}')")
    return [str(name) for (name,) in names]


def drop_postgresql_databases(server: dict[str, Any], prefix: str) -> None:
    import psycopg

    end = time.monotonic() + PATIENCE
    with administrator(server) as run:
        for name in postgresql_databases(run, prefix):
            while True:
                try:
                    run(f"DROP DATABASE {name} WITH (FORCE)")
                    break
                except psycopg.errors.ObjectInUse:
                    # FORCE ends sessions, but waits only five seconds until they have ended.
                    if time.monotonic() > end:
                        raise
