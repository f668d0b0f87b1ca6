"""A fleet whose ``migrate_shards`` is killed again and again, and restored in between."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.integration.migrate import kill_plan, kill_server
from tests.integration.migrate.fleet_project import NODES, ROOT, Done, Fleet, fleet_on
from tests.integration.migrate.kill_server import Moment
from tests.patience import PATIENCE
from tests.services import find_program
from tests.services.postgresql import DATABASE, FOLDERS

SHARDS = 6
NEVER = Moment()
_ROUNDS = 12


class NotAsItShouldBe(AssertionError):
    """A run and its reruns have left something wrong."""


@dataclass
class Killing:
    """A project with something to migrate, a process that forks commands, and a stored state."""

    fleet: Fleet
    store: Store
    server: subprocess.Popen[str]
    backend: str
    #: Ablations of the engine that all commands use; see ``kill_server.ABLATIONS``.
    ablations: Sequence[str] = ()
    _number: int = 0
    #: The unclear operations, in the order in which they were reported.
    unclear: list[str] = field(default_factory=list)

    # ##### Commands #####

    def start(self, *arguments: object, kill: Moment = NEVER) -> Started:
        """Start a command in a process of its own."""
        self._number += 1
        output = str(self.fleet.folder / f"output{self._number}")
        request = {
            "arguments": list(map(str, arguments)),
            "moment": asdict(kill),
            "output": output,
            "ablations": [] if arguments == ("look",) else list(self.ablations),
        }
        return Started(self, self._ask(request), output)

    def _ask(self, request: dict[str, Any]) -> int:
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        answer = json.loads(self.server.stdout.readline())
        assert isinstance(answer, int)
        return answer

    def run(self, *arguments: object) -> Done:
        return self.start(*arguments).end()

    def migrate(self, selected: Sequence[str]) -> Done:
        return self.run("migrate_shards", *selected)

    def run_until_killed(self, selected: Sequence[str], moment: Moment) -> None:
        """Migrate with a process that is killed."""
        done = self.start("migrate_shards", *selected, kill=moment).end()
        assert done.status == -signal.SIGKILL, f"{moment} did not come: {done.err}"

    def look(self) -> dict[str, Any]:
        content: dict[str, Any] = self.run("look").json
        return content

    # ##### Complete runs #####

    def run_to_end(self, selected: Sequence[str]) -> None:
        """Run the command until nothing is left to do; settle unclear operations as it asks."""
        for _ in range(_ROUNDS):
            if self.is_finished(self.migrate(selected)):
                return
        raise NotAsItShouldBe(f"not done after {_ROUNDS} times")

    def run_to_end_with_kills(self, selected: Sequence[str], least: int) -> int:
        """Run to the end, with every process killed as soon as it has done something on a shard.

        :param least: changes of shards that a process makes before it is killed. If a change is
            rolled back because its transaction was not committed, the next process gets further.
        :returns: number of killed processes.
        """
        kills, kill = 0, least
        before = self.look()["shards"]
        while True:
            moment = Moment(kill, only_shards=True)
            done = self.start("migrate_shards", *selected, kill=moment).end()
            if done.status != -signal.SIGKILL:
                if self.is_finished(done):
                    return kills
                continue
            kills += 1
            after = self.look()["shards"]
            kill = least if after != before else kill + 1
            before = after

    def is_finished(self, done: Done) -> bool:
        """Whether that run has finished everything; settles unclear operations.

        :raises NotAsItShouldBe: something failed.
        """
        if done.status == 0:
            return True
        failures = self.failures()
        if not failures or any(failure["state"] != "unclear" for failure in failures):
            raise NotAsItShouldBe(f"status {done.status}: {done.err} {failures}")
        for failure in failures:
            self.settle(failure)
        return False

    def failures(self) -> list[dict[str, str]]:
        status = self.run("migrate_shards", "--status", "--json").json
        failures: list[dict[str, str]] = status["groups"]["shop"]["failures"]
        return failures

    def settle(self, failure: dict[str, str], *, complete: bool | None = None) -> None:
        """Do what the message asks for, as a person would after looking at the shard.

        :param complete: whether to complete the rest by hand, rather than to undo it.
        """
        alias, text = failure["alias"], failure["error"]
        name = failure["migration"].partition(".")[2]
        self.unclear.append(name)
        if name not in kill_plan.UNCLEAR:
            raise NotAsItShouldBe(f"{failure['migration']} is unclear: {text}")
        for part in (alias, failure["migration"], failure["operation"], "--settle",
                     f"{alias}=done", f"{alias}=undone"):  # fmt: skip
            assert part in text, f"{part!r} is not in {text!r}"
        expected = list(kill_plan.UNCLEAR[name])
        shard = self.look()["shards"][alias]
        there = [row["word"] for row in shard["shop_log"] if row["word"] in expected]
        has_side = kill_plan.SIDE in shard["definitions"] or name != "0005_commits"
        if complete is None:
            complete = not len(self.unclear) % 2
        if there == expected and has_side:
            answer = "done"
        elif complete:
            answer = "done"
            for word in expected[len(there) :]:
                self.store.execute(
                    alias, f"INSERT INTO shop_log (user_id, word) VALUES (1, '{word}')"
                )
            if not has_side:
                self.store.execute(alias, f"CREATE TABLE {kill_plan.SIDE} (id integer PRIMARY KEY)")
        else:
            answer = "undone"
            for word in there:
                self.store.execute(alias, f"DELETE FROM shop_log WHERE word = '{word}'")
            if name == "0005_commits":
                self.store.execute(alias, f"DROP TABLE IF EXISTS {kill_plan.SIDE}")
        settled = self.run("migrate_shards", "--settle", f"{alias}={answer}")
        if settled.status:
            raise NotAsItShouldBe(settled.err)

    def check(self, promised: dict[str, Any], aliases: Sequence[str]) -> None:
        """Check that the result equals the result of an undisturbed run.

        :param promised: return value of :meth:`look` after an undisturbed run.
        """
        content = self.look()
        for alias in aliases:
            mine, theirs = content["shards"][alias], promised["shards"][alias]
            words = sorted(row["word"] for row in mine["shop_log"])
            if words != kill_plan.WORDS:
                raise NotAsItShouldBe(f"{alias}: {words}")
            for what in ("definitions", "records", "shop_order"):
                if mine[what] != theirs[what]:
                    raise NotAsItShouldBe(f"{alias}: {mine[what]} instead of {theirs[what]}")
        left = {name: content[name] for name in content if name != "shards" and content[name]}
        if left:
            raise NotAsItShouldBe(f"left behind: {left}")

    def close(self) -> None:
        # Its input ends, and so it ends.
        self.server.communicate(timeout=PATIENCE)


@dataclass(frozen=True)
class Started:
    """A running command."""

    killing: Killing
    pid: int
    output: str

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def end(self) -> Done:
        """Wait for it."""
        status = self.killing._ask({"wait": self.pid})
        out, err = (Path(f"{self.output}.{name}").read_text() for name in ("out", "err"))
        assert status != 70, err
        return Done(status, out, err)

    @property
    def events(self) -> list[str]:
        """The events of the command in order. If it was killed, the last one did not happen."""
        return Path(f"{self.output}.events").read_text().splitlines()


# ##### Restoring the databases #####


class Store:
    """The content of the databases at one moment."""

    def keep(self) -> None: ...
    def put_back(self) -> None: ...
    def execute(self, alias: str, statement: str) -> None: ...
    def close(self) -> None: ...


class Files(Store):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept = folder / "kept"

    def keep(self) -> None:
        for name in NODES:
            shutil.copytree(self._folder / name, self._kept / name)
        shutil.copy(self._folder / "default.sqlite3", self._kept)

    def put_back(self) -> None:
        for name in NODES:
            shutil.rmtree(self._folder / name)
            shutil.copytree(self._kept / name, self._folder / name)
        for path in self._folder.glob("default.sqlite3*"):
            path.unlink()
        shutil.copy(self._kept / "default.sqlite3", self._folder)

    def execute(self, alias: str, statement: str) -> None:
        import sqlite3

        (path,) = self._folder.glob(f"*/{alias}.sqlite3")
        connection = sqlite3.connect(path)
        try:
            with connection:
                connection.execute(statement)
        finally:
            connection.close()


class Schemas(Store):
    """Schemas of MariaDB servers, restored statement by statement."""

    def __init__(self, addresses: Sequence[Any], prefix: str) -> None:
        import MySQLdb

        self._addresses = addresses
        self._prefix = prefix
        self._connections = [
            MySQLdb.connect(**address.mysqldb(), autocommit=True) for address in addresses
        ]
        self._kept: list[list[str]] = []

    def keep(self) -> None:
        for connection in self._connections:
            statements = ["SET foreign_key_checks = 0"]
            for (name,) in self.rows(connection, f"SHOW DATABASES LIKE '{self._prefix}shop%'"):
                statements += [f"CREATE DATABASE {name}", f"USE {name}"]
                for (table,) in self.rows(connection, f"SHOW TABLES FROM {name}"):
                    definition = self.rows(connection, f"SHOW CREATE TABLE {name}.{table}")[0][1]
                    statements.append(definition)
                    for row in self.rows(connection, f"SELECT * FROM {name}.{table}"):
                        values = ", ".join(connection.literal(value).decode() for value in row)
                        statements.append(f"INSERT INTO {table} VALUES ({values})")
            self._kept.append(statements)

    def put_back(self) -> None:
        for connection, kept in zip(self._connections, self._kept, strict=True):
            gone = self.rows(connection, f"SHOW DATABASES LIKE '{self._prefix}shop%'")
            for statement in [*(f"DROP DATABASE {name}" for (name,) in gone), *kept]:
                self.rows(connection, statement)
        for table in ("script", "step", "run"):
            self.rows(
                self._connections[0], f"DELETE FROM {self._prefix}default.sharded_orm_{table}"
            )

    def execute(self, alias: str, statement: str) -> None:
        schema = f"{self._prefix}{alias}"
        for connection in self._connections:
            if self.rows(connection, f"SHOW DATABASES LIKE '{schema}'"):
                self.rows(connection, f"USE {schema}")
                self.rows(connection, statement)

    @property
    def first(self) -> Any:
        """A connection to the server of shard 0."""
        return self._connections[0]

    def another(self, alias: str) -> Any:
        """Return a new connection to the schema of a shard on that server."""
        import MySQLdb

        return MySQLdb.connect(**self._addresses[0].mysqldb(), db=self.schema(alias))

    def schema(self, alias: str) -> str:
        return f"{self._prefix}{alias}"

    @staticmethod
    def rows(connection: Any, statement: str) -> list[Any]:
        cursor = connection.cursor()
        cursor.execute(statement)
        return list(cursor.fetchall())

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


class PostgreSQLSchemas(Store):
    """Schemas of PostgreSQL servers, restored from what ``pg_dump`` has written."""

    def __init__(self, addresses: Sequence[Any], prefix: str) -> None:
        self._addresses = addresses[: len(NODES)]
        self._prefix = prefix
        self._connections = [self._connect(address) for address in self._addresses]
        self._kept: list[str] = []

    def keep(self) -> None:
        program = find_program("PostgreSQL", "pg_dump", folders=FOLDERS)
        for address in self._addresses:
            given = address.psycopg(DATABASE)
            dumped = subprocess.run(
                [program, "--inserts", "--host", given["host"], "--port", str(given["port"]),
                 "--username", given["user"], "--schema", f"{self._prefix}shop*", DATABASE],
                env={**os.environ, "PGPASSWORD": given["password"]},
                check=True, capture_output=True, text=True,
            )  # fmt: skip
            lines = dumped.stdout.splitlines(keepends=True)
            # Lines with a backslash are for psql.
            self._kept.append("".join(line for line in lines if not line.startswith("\\")))

    def put_back(self) -> None:
        for connection, kept in zip(self._connections, self._kept, strict=True):
            names = f"SELECT nspname FROM pg_namespace WHERE nspname ^@ '{self._prefix}shop'"
            gone = [f'DROP SCHEMA "{name}" CASCADE' for (name,) in self.rows(connection, names)]
            for statement in [*gone, kept, "RESET ALL"]:
                self.rows(connection, statement)
        with closing(self._connect(self._addresses[0], f"{self._prefix}default")) as connection:
            for table in ("script", "step", "run"):
                self.rows(connection, f"DELETE FROM sharded_orm_{table}")

    def execute(self, alias: str, statement: str) -> None:
        schema = f"{self._prefix}{alias}"
        for connection in self._connections:
            if self.rows(connection, f"SELECT FROM pg_namespace WHERE nspname = '{schema}'"):
                self.rows(connection, f'SET search_path TO "{schema}"')
                self.rows(connection, statement)

    @property
    def first(self) -> Any:
        """A connection to the server of shard 0."""
        return self._connections[0]

    @staticmethod
    def rows(connection: Any, statement: str) -> list[Any]:
        done = connection.execute(statement)
        return list(done.fetchall()) if done.description else []

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    @staticmethod
    def _connect(address: Any, database: str = DATABASE) -> Any:
        import psycopg

        return psycopg.connect(**address.psycopg(database), autocommit=True)


@contextmanager
def killing_on(backend: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[Killing]:
    """Shards 0, 1, 3 and 4 have the first migration and rows; 2 and 5 do not exist."""
    with fleet_on(backend, request, folder, shop=SHARDS) as fleet:
        kill_plan.write(fleet)
        store: Store
        if backend == "sqlite":
            store = Files(folder)
        else:
            name = fleet.python(
                "from django.conf import settings as s\nprint(s.DATABASES['default']['NAME'])"
            ).strip()
            kind = Schemas if backend == "mariadb" else PostgreSQLSchemas
            store = kind(request.getfixturevalue(f"{backend}_nodes"), name.removesuffix("default"))
        killing = Killing(fleet, store, _serve(fleet), backend)
        try:
            some = ("--shards", "0,1,3,4")
            done = killing.run("migrate_shards", "shop", "0001", "--create", *some)
            assert not done.status, done.err
            for number in (0, 1, 3, 4):
                for title in ("one", "two"):
                    store.execute(
                        f"shop_{number:05d}",
                        f"INSERT INTO shop_order (user_id, title) VALUES ({number}, '{title}')",
                    )
            store.keep()
            yield killing
        finally:
            killing.close()
            store.close()


def _serve(fleet: Fleet) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(fleet.folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-W", "error", kill_server.__file__],
        cwd=fleet.folder,
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("DJANGO_")},
            "DJANGO_SETTINGS_MODULE": "settings",
            "PYTHONPATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
