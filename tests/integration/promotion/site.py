"""Two servers in replication, a site on them, and the commands of its operator."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE
from typing import Any

import MySQLdb
from MySQLdb.cursors import DictCursor

from tests.integration.promotion.project import prepare
from tests.integration.promotion.source import replace_file
from tests.patience import PATIENCE
from tests.prepared_process import prepared_by
from tests.python_process import PythonProcess
from tests.services.memcached import MemcachedServer
from tests.services.replication import Pair, execute, wait_until_equal
from tests.services.zookeeper import ZooKeeperServer

ROOT = Path(__file__).parents[3]
SOURCE = "tests.integration.promotion.source.WritableFile"
SHARDS, USERS = 4, 16
#: Runs before the code that a test gives to a process of the site.
PREAMBLE = """
import json
from sharded_orm import runtime
from tests.integration.promotion.entries.models import Entry
"""
#: Code that looks for the entry 7 of user 0.
LOOK_UP_7 = """
try:
    answer = Entry.objects.get(user_id=0, entry_id=7).pk
except Entry.DoesNotExist:
    answer = "is not there"
"""
_content_by_name: dict[str, bytes] = {}
ALL_MOVES = ["photos 0-1", "photos 2-3", "visits 0-0"]


def _group(strategy: str, *spans: tuple[int, int]) -> dict[str, Any]:
    return {
        "STRATEGY": strategy,
        "RANGES": [{"range": list(span), "primary": "db1", "replica": "db2"} for span in spans],
    }


GROUPS = {
    "photos": _group("modulo", (0, 1), (2, 3)),
    "visits": {**_group("directory", (0, 0)), "DATABASE_NAME": "photos_visits_{shard}"},
}


def create_once(
    folder: Path, content_by_name: dict[str, bytes], create: Callable[[], None]
) -> None:
    """Create the databases in ``folder``: by ``create`` once in a test run, after that by copying.

    :param content_by_name: the content of the files, filled by the first call.
    """
    if not content_by_name:
        create()
        for path in folder.rglob("*.sqlite3"):
            content_by_name[str(path.relative_to(folder))] = path.read_bytes()
    for name, content in content_by_name.items():
        (folder / name).write_bytes(content)


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.out)
        return value


@dataclass
class Site:
    """``db1`` is the first server, ``db2`` the second; all ranges are on db1 at first."""

    pair: Pair
    folder: Path
    setting: dict[str, Any] = field(default_factory=dict)
    databases: dict[str, Any] = field(default_factory=dict)
    caches: dict[str, Any] = field(default_factory=dict)
    #: More names for INSTALLED_APPS.
    apps: list[str] = field(default_factory=list)
    groups: dict[str, Any] = field(default_factory=lambda: json.loads(json.dumps(GROUPS)))

    def __post_init__(self) -> None:
        self.databases = {
            "default": {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": str(self.folder / "default.sqlite3"),
                "OPTIONS": {"timeout": PATIENCE},
            }
        }
        self.setting = {
            "NODES": {
                "db1": self.pair.node(self.pair.first),
                "db2": self.pair.node(self.pair.second),
            },
            "GROUPS": {
                name: {k: v for k, v in group.items() if k != "RANGES"}
                for name, group in self.groups.items()
            },
            "TOPOLOGY": {"SOURCE": SOURCE, "OPTIONS": self.source_options},
        }
        self.save()
        self.publish(self.groups)

    # ##### The site #####

    @property
    def source_options(self) -> dict[str, Any]:
        return {"PATH": str(self.document_file), "LAST_GOOD": str(self.folder / "last_good")}

    @property
    def file(self) -> Path:
        return self.folder / "site.json"

    @property
    def document_file(self) -> Path:
        return self.folder / "topology.json"

    def save(self) -> None:
        """Write the settings for processes that start from now on."""
        (self.folder / "last_good").unlink(missing_ok=True)
        self.file.write_text(
            json.dumps(
                {
                    "databases": self.databases,
                    "sharded_orm": self.setting,
                    "caches": self.caches,
                    "apps": self.apps,
                }
            )
        )

    def publish(self, groups: dict[str, Any]) -> None:
        """Put another document into the source without any check."""
        version = self.document()["version"] + 1 if self.document_file.exists() else 1
        document = {"format": 1, "version": version, "nodes": {}, "groups": groups}
        replace_file(self.document_file, json.dumps(document))

    def document(self) -> dict[str, Any]:
        """Return the document in the source."""
        if self.setting["TOPOLOGY"]["SOURCE"] != SOURCE:
            return self.manage("topology", "pull").json
        document: dict[str, Any] = json.loads(self.document_file.read_text())
        return document

    def move_to_zookeeper(self, zookeeper: ZooKeeperServer) -> None:
        """Have processes that start from now on read the topology from ZooKeeper."""
        self.setting["TOPOLOGY"] = {
            "SOURCE": "zookeeper",
            "OPTIONS": {
                "HOSTS": zookeeper.hosts,
                "PATH": f"/{self.folder.name}",
                "LAST_GOOD": str(self.folder / "last_good"),
            },
        }
        self.save()
        # A process starts with this copy while ZooKeeper has no document.
        (self.folder / "last_good").write_text(self.document_file.read_text())
        done = self.manage("topology", "push", str(self.document_file))
        assert done.code == 0, done.err

    def primaries(self) -> set[str]:
        ranges = [r for group in self.document()["groups"].values() for r in group["RANGES"]]
        return {each["primary"] for each in ranges}

    def replicas(self) -> set[str | None]:
        ranges = [r for group in self.document()["groups"].values() for r in group["RANGES"]]
        return {each["replica"] for each in ranges}

    def trouble(self, what: str) -> None:
        """Give the source a fault, or none; see ``WritableFile``."""
        self.document_file.with_suffix(".trouble").write_text(what)

    def journal(self, sql: str) -> None:
        """Run a statement in the global database."""
        file = self.folder / "default.sqlite3"
        with contextlib.closing(sqlite3.connect(file, timeout=PATIENCE)) as connection:
            connection.execute(sql)
            connection.commit()

    def create_databases(self) -> None:
        """Create the journal, and the shards on both servers."""
        self.pair.reset("photos_")
        self._create_default()
        for number in range(SHARDS):
            schema = f"photos_{number:05d}"
            execute(self.pair.first, f"CREATE DATABASE {schema}")
            execute(
                self.pair.first,
                f"CREATE TABLE {schema}.entries_entry"
                " (entry_id BIGINT PRIMARY KEY, user_id BIGINT NOT NULL)",
            )
        execute(self.pair.first, "CREATE DATABASE photos_visits_0")
        wait_until_equal(self.pair)

    def _create_default(self) -> None:

        def migrate() -> None:
            done = self.manage("migrate", "--database", "default")
            assert done.code == 0, done.err

        create_once(self.folder, _content_by_name, migrate)

    # ##### Processes of the site #####

    def start(self, *arguments: str, **environment: str) -> PythonProcess:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("DJANGO_", "PYTEST"))}
        return PythonProcess(
            ["-m", "tests.integration.promotion.project", str(self.file), *arguments],
            cwd=ROOT,
            env={**inherited, **environment},
            stdin=PIPE,
            prepared=prepared_by(prepare, *self.apps),
        )

    def manage(self, *arguments: str, answer: str = "", **environment: str) -> Done:
        """Run a command of ``manage.py`` to its end."""
        process = self.start(*arguments, **environment)
        out, err = process.communicate(answer, timeout=PATIENCE)
        assert "Traceback" not in err, err
        return Done(process.returncode, out, err)

    def run(self, code: str) -> Any:
        """Run Python in a process of the site and return its ``answer``, passed as JSON."""
        done = self.manage(
            "shell", "-v", "0", "-c", f"{PREAMBLE}\n{code}\nprint(json.dumps(answer))"
        )
        assert done.code == 0, done.err
        return json.loads(done.out)

    def promote(self, *arguments: str, code: int = 0, answer: str = "", **env: str) -> Done:
        """Run ``manage.py shards promote db1 …``; it must exit with the status ``code``."""
        done = self.manage("shards", "promote", "db1", *arguments, answer=answer, **env)
        assert done.code == code, f"{done.code}\n{done.out}\n{done.err}"
        return done

    def promote_and_die(self, where: str, *arguments: str) -> None:
        self.promote(*arguments, code=-signal.SIGKILL, KILL_AT=where)

    @contextlib.contextmanager
    def writers(self, count: int) -> Iterator[Writers]:
        """Start processes that write all the time; they end with the block."""
        writers = Writers(self, count)
        try:
            yield writers
        finally:
            writers.stop()

    # ##### The state of the servers #####

    def is_read_only(self, which: str) -> bool:
        ((value,),) = execute(getattr(self.pair, which), "SELECT @@read_only")
        return bool(value)

    def logged(self, which: str) -> str:
        ((value,),) = execute(getattr(self.pair, which), "SELECT @@gtid_binlog_pos")
        return str(value)

    def replicates(self) -> bool:
        """Whether the second server replicates."""
        return self._slave("Slave_IO_Running", "Slave_SQL_Running") == ("Yes", "Yes")

    def wait_until_equal(self) -> None:
        wait_until_equal(self.pair)

    def open_first(self) -> None:
        """Remove the fence of the first server, as somebody who knows of no promotion."""
        execute(self.pair.first, "SET GLOBAL read_only = OFF")

    def fence_first(self) -> None:
        execute(self.pair.first, "SET GLOBAL read_only = ON")

    def is_refusal(self, code: int, text: str) -> bool:
        """Whether a writer's error is one of the fence."""
        return code == 1290

    #: A part of what the command says to do afterwards.
    advice = "read_only"
    #: The last phase before the map may be published, and before the new primary takes writes.
    last_before_switching, last_before_switched = "unfencing", "switching"

    def has_logged_nothing_since(self, position: str, promoted_at: str) -> bool:
        """Whether nothing has reached the first server since the promotion read its last position."""
        return self.logged("first") == position == promoted_at

    def follow_back(self) -> None:
        """Have the first server follow the second one, which was promoted."""
        execute(self.pair.second, "RESET SLAVE ALL")
        self.pair.follow(self.pair.first, self.pair.second)

    def stop_receiving(self) -> None:
        """Have the second server receive nothing more from the first."""
        execute(self.pair.second, "STOP SLAVE IO_THREAD")

    def start_receiving(self) -> None:
        execute(self.pair.second, "START SLAVE IO_THREAD")

    def is_as_before(self) -> bool:
        return self.primaries() == {"db1"} and self.are_as_before()

    def are_as_before(self) -> bool:
        """Whether the servers are as before, whatever the topology says."""
        return not self.is_read_only("first") and self.is_read_only("second") and self.replicates()

    def is_promoted(self) -> bool:
        return (
            self.primaries() == {"db2"}
            and self.is_read_only("first")
            and not self.is_read_only("second")
            and not self.replicates()
        )

    @contextlib.contextmanager
    def locked(self, which: str) -> Iterator[None]:
        """Make writes of rows wait for the end of the block, those of replication as well."""
        connection = MySQLdb.connect(**getattr(self.pair, which).address.mysqldb())
        with contextlib.closing(connection), connection.cursor() as cursor:
            cursor.execute("LOCK TABLES photos_00000.entries_entry WRITE")
            yield

    @contextlib.contextmanager
    def unlogged_on_second(self) -> Iterator[Callable[[str], Any]]:
        """Yield a function that runs statements on the second server without its binary log."""
        connection = MySQLdb.connect(**self.pair.second.address.mysqldb(), autocommit=True)
        with contextlib.closing(connection), connection.cursor() as cursor:
            cursor.execute("SET sql_log_bin = 0")
            yield cursor.execute

    def wait_until_replicating(self) -> None:
        self._wait(lambda: self._slave("Slave_IO_Running", "Slave_SQL_Running") == ("Yes", "Yes"))

    def wait_until_received(self) -> None:
        """Return when the second server has all events of the first in its relay log."""
        self._wait(lambda: self._slave("Gtid_IO_Pos") == (self.logged("first"),))

    def wait_for_run(self, phase: str = "") -> None:
        """Return when a promotion is running, in this phase."""

        def is_there() -> bool:
            with contextlib.closing(sqlite3.connect(self.folder / "default.sqlite3")) as connection:
                rows = connection.execute(
                    "SELECT arguments FROM sharded_orm_run WHERE unfinished"
                ).fetchall()
            return any(not phase or json.loads(row[0]).get("phase") == phase for row in rows)

        self._wait(is_there)

    def let_lease_expire(self) -> None:
        """Let the lease of a stopped process expire that holds the run."""
        self.journal("UPDATE sharded_orm_run SET alive_at = '2000-01-01 00:00:00'")

    def _slave(self, *names: str) -> tuple[str, ...]:
        connection = MySQLdb.connect(**self.pair.second.address.mysqldb())
        with contextlib.closing(connection), connection.cursor(DictCursor) as cursor:
            cursor.execute("SHOW ALL SLAVES STATUS")
            (row,) = cursor.fetchall()
        return tuple(row[name] for name in names)

    def _wait(self, there: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not there():
            assert time.monotonic() < end
            time.sleep(0.02)  # between two attempts

    def rows(self, which: str) -> set[int]:
        """Return the ids of all entries on a server."""
        return {
            row[0]
            for number in range(SHARDS)
            for row in execute(
                getattr(self.pair, which), f"SELECT entry_id FROM photos_{number:05d}.entries_entry"
            )
        }

    def use_cache(self, server: MemcachedServer) -> None:
        """Have processes that start from now on cache entries."""
        # A prefix has at most 32 characters; the number of the folder is at its end.
        self.caches = {"default": server.django()}
        self.setting["CACHE"] = {
            "OBJECTS": "default", "PREFIX": f"{self.folder.name[-31:]}:", "TIMEOUT": 1.0,
            "COMMIT_WITHIN": 1.5, "QUARANTINE": 3.5,
        }  # fmt: skip
        self.save()

    def write_a_row(self, number: int, which: str = "first") -> None:
        execute(
            getattr(self.pair, which),
            "INSERT INTO photos_00000.entries_entry VALUES (%s, 0)",
            (number,),
        )


class Writers:
    """Processes of the application that write, and record which rows were acknowledged."""

    def __init__(self, site: Site, count: int) -> None:
        self._site = site
        self._folder = site.folder
        self._processes = [
            site.start("write", str(self._folder), str(number), str(USERS))
            for number in range(count)
        ]
        self.numbers = range(count)
        for number in self.numbers:
            self.wait_for_more(number)

    def acknowledged(self, number: int) -> list[tuple[float, int]]:
        lines = self._read("acknowledged", number)
        return [(float(at), int(row)) for at, row in (line.split() for line in lines)]

    def errors(self, number: int) -> list[tuple[float, int, str]]:
        lines = (line.split(" ", 2) for line in self._read("errors", number))
        return [(float(at), int(code), text) for at, code, text in lines]

    def _read(self, what: str, number: int) -> list[str]:
        try:
            text = (self._folder / f"{what}-{number}").read_text()
        except FileNotFoundError:
            return []
        return text[: text.rfind("\n") + 1].splitlines()

    def wait_for_more(self, number: int, count: int = 20) -> None:
        """Return when a writer has written ``count`` more rows."""
        goal = len(self.acknowledged(number)) + count
        self._wait(number, lambda: len(self.acknowledged(number)) >= goal, "writes no more")

    def wait_for_refusals(self, number: int) -> None:
        """Return when a writer was refused once more."""
        before = len(self.errors(number))
        self._wait(number, lambda: len(self.errors(number)) > before, "is not refused")

    def _wait(self, number: int, there: Callable[[], bool], otherwise: str) -> None:
        end = time.monotonic() + PATIENCE
        while not there():
            assert self._processes[number].poll() is None, self._processes[number].communicate()
            assert time.monotonic() < end, f"writer {number} {otherwise}"
            time.sleep(0.02)  # between two reads of its file

    def stop(self) -> None:
        (self._folder / "stop").touch()
        for process in self._processes:
            _, err = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, err

    def longest_silence(self) -> float:
        """Return the largest number of seconds between two acknowledged writes of one writer."""
        return max(
            after - before
            for number in self.numbers
            for (before, _), (after, _) in zip(
                self.acknowledged(number), self.acknowledged(number)[1:], strict=False
            )
        )
