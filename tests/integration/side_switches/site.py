"""A site on a pair of servers that replicate from each other, and the commands of its operator."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import MySQLdb

from tests.integration.promotion.site import SHARDS, Done, Site
from tests.services.replication import (
    APPLICATION,
    OPERATOR,
    LoggingServer,
    MasterPair,
    execute,
    execute_alone,
    master_pair,
)
from tests.services.server import HOST

#: Options of servers that lose no commit if their process is killed.
DURABLE = {"innodb-flush-log-at-trx-commit": "2"}
#: The message of a fence.
REFUSED = "passive side of a pair"
#: MariaDB's error for a write on a read-only server.
READ_ONLY = 1290
PAIR = {"pair": ["db1", "db2"]}
#: Half of the shards of ``photos`` are active on each side.
GROUPS = {
    "photos": {
        "STRATEGY": "modulo",
        "RANGES": [
            {"range": [0, 1], **PAIR, "active": "db1"},
            {"range": [2, 3], **PAIR, "active": "db2"},
        ],
    },
}


@contextlib.contextmanager
def pair_of_servers(**options: str | None) -> Iterator[MasterPair]:
    """Start two servers that replicate from each other, with what the operator of switches needs.

    :param options: further options of both servers.
    """
    with master_pair(**{"log-bin-trust-function-creators": "ON", **options}) as pair:
        for server in (pair.first, pair.second):
            execute_alone(
                server,
                f"GRANT CREATE ROUTINE, ALTER ROUTINE, EXECUTE ON `%`.* TO {OPERATOR[0]}@'%'",
            )
        yield pair


@dataclass
class PairSite(Site):
    """``db1`` and ``db2`` are a pair; shards 0 and 1 of ``photos`` are active on db1, 2 and 3 on db2."""

    pair: MasterPair
    groups: dict[str, Any] = field(default_factory=lambda: json.loads(json.dumps(GROUPS)))

    def __post_init__(self) -> None:
        super().__post_init__()
        for node in self.setting["NODES"].values():
            node.pop("REPLICATION")  # the account, which a switch does not need
        self.save()

    def create_databases(self) -> None:
        """Create the journal and the shards. The passive sides are not fenced yet."""
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
        self.wait_until_equal()

    def fence(self) -> None:
        self.switch("photos", "0-3", "--fence")

    def wait_until_equal(self) -> None:
        """Return when each server has what the other has logged until now."""
        self.pair.settle()

    def switch(self, *arguments: str, code: int = 0, **environment: str) -> Done:
        """Run ``manage.py shards switch …``; it must exit with the status ``code``."""
        done = self.manage("shards", "switch", *arguments, **environment)
        assert done.code == code, f"{done.code}\n{done.out}\n{done.err}"
        return done

    def switch_and_die(self, where: str, *arguments: str) -> None:
        self.switch(*arguments, code=-signal.SIGKILL, KILL_AT=where)

    def active(self) -> list[str]:
        """Return the active side of each shard of ``photos``, by the published topology."""
        sides = []
        for entry in self.document()["groups"]["photos"]["RANGES"]:
            first, last = entry["range"]
            sides += [entry["active"]] * (last + 1 - first)
        return sides

    def writable(self, number: int = 0) -> list[str]:
        """Return the sides on which the database takes writes of a shard of ``photos``."""
        return [
            name
            for name, server in (("db1", self.pair.first), ("db2", self.pair.second))
            if self.takes_writes(server, number)
        ]

    def takes_writes(self, server: LoggingServer, number: int) -> bool:
        try:
            self.as_application(
                server,
                f"START TRANSACTION; INSERT INTO photos_{number:05d}.entries_entry VALUES (-1, 0); ROLLBACK",
            )
        except MySQLdb.OperationalError as exc:
            if REFUSED not in exc.args[1] and exc.args[0] != READ_ONLY:
                raise
            return False
        return True

    @contextlib.contextmanager
    def watched(self, number: int = 0) -> Iterator[list[str]]:
        """Try all the time, in another thread, to write to a shard on both sides at once.

        Yield a list that gets an entry for each attempt: the sides that took a write while the
        transaction of a write on the other one was open.
        """
        found: list[str] = []
        ended = threading.Event()

        def watch() -> None:
            while not ended.is_set():
                for one, other in (("first", "second"), ("second", "first")):
                    with self.writing(one, number) as is_open:
                        if is_open:
                            with self.writing(other, number) as both:
                                found.append("both" if both else one)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield found
        finally:
            ended.set()
            thread.join()

    @contextlib.contextmanager
    def writing(self, which: str, number: int) -> Iterator[bool]:
        """Hold a transaction open that has written on one side. Yield False if that was refused."""
        connection = self._connect(getattr(self.pair, which))
        with contextlib.closing(connection), connection.cursor() as cursor:
            try:
                cursor.execute("START TRANSACTION")
                cursor.execute(f"INSERT INTO photos_{number:05d}.entries_entry VALUES (-1, 0)")
            except MySQLdb.OperationalError as exc:
                if REFUSED not in exc.args[1]:
                    raise
                yield False
            else:
                yield True
            cursor.execute("ROLLBACK")

    def as_application(self, server: LoggingServer, statements: str) -> None:
        """Run statements with the account of the application."""
        connection = self._connect(server)
        with contextlib.closing(connection), connection.cursor() as cursor:
            for statement in statements.split("; "):
                cursor.execute(statement)

    def _connect(self, server: LoggingServer) -> Any:
        return MySQLdb.connect(
            host=HOST,
            port=server.port,
            user=APPLICATION[0],
            password=APPLICATION[1],
            autocommit=True,
        )

    def all_rows(self) -> set[int]:
        """Return the ids of all entries; they are the same on both servers."""
        self.wait_until_equal()
        rows = self.rows("first")
        assert rows == self.rows("second")
        return rows
