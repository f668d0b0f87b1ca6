"""A site on two pairs of servers, each behind a proxy, and what may happen to them during a switch."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import MySQLdb

from tests.integration.promotion.site import SHARDS
from tests.integration.side_switches.site import PairSite
from tests.integration.side_switches.test_kills import MOMENTS
from tests.integration.stopped_process import go_on, wait_until_stopped
from tests.services.proxy import Proxy
from tests.services.replication import (
    APPLICATION,
    LoggingServer,
    MasterPair,
    execute,
)
from tests.services.server import HOST

#: The shards of each pair of servers.
SPANS = ("0-1", "2-3")
#: What may happen while an operator's process switches the sides of a pair.
FAULTS = ("operator", "server", "network")


def _groups() -> dict[str, Any]:
    ranges = [
        {"range": [0, 1], "pair": ["db1", "db2"], "active": "db1"},
        {"range": [2, 3], "pair": ["db3", "db4"], "active": "db3"},
    ]
    return {"photos": {"STRATEGY": "modulo", "RANGES": ranges}}


@dataclass(kw_only=True)
class StormSite(PairSite):
    """``db1`` and ``db2`` are the pair of shards 0 and 1, ``db3`` and ``db4`` that of shards 2 and 3.

    Each server has a proxy, through which the site and the replication reach it.
    """

    other_pair: MasterPair
    proxies: dict[str, Proxy]
    groups: dict[str, Any] = field(default_factory=_groups)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, server in self.servers.items():
            port = self.proxies[name].port
            self.setting["NODES"][name] = self.pair.node(server, PORT=port)
        # Longer than it takes until a switch is ended that was broken off.
        self.setting["MOVE_WAIT"] = 120
        self.save()

    @property
    def servers(self) -> dict[str, LoggingServer]:
        pairs = (self.pair, self.other_pair)
        both = [server for pair in pairs for server in (pair.first, pair.second)]
        return dict(zip(("db1", "db2", "db3", "db4"), both, strict=True))

    def create_databases(self) -> None:
        self._create_default()
        names = list(self.servers)
        for pair, span in ((self.pair, (0, 1)), (self.other_pair, (2, 3))):
            pair.reset("photos_")
            for number in span:
                schema = f"photos_{number:05d}"
                execute(pair.first, f"CREATE DATABASE {schema}")
                execute(
                    pair.first,
                    f"CREATE TABLE {schema}.entries_entry"
                    " (entry_id BIGINT PRIMARY KEY, user_id BIGINT NOT NULL)",
                )
            pair.settle()
            first, second = names[span[0]], names[span[0] + 1]
            for replica, source in ((first, second), (second, first)):
                execute(self.servers[replica], "STOP SLAVE")
                execute(
                    self.servers[replica],
                    f"CHANGE MASTER TO MASTER_PORT = {self.proxies[source].port:d}",
                )
                execute(self.servers[replica], "START SLAVE")
        self.wait_until_equal()

    def wait_until_equal(self) -> None:
        self.pair.settle()
        self.other_pair.settle()

    # ##### Switches and faults #####

    def switch_under(self, fault: str, span: str, side: str, chosen: random.Random) -> None:
        """Switch the shards of a pair to ``side`` while ``fault`` happens at a random step.

        :param fault: one of :data:`FAULTS`; "" for none.
        """
        command = ("photos", span, "--to-side", side)
        moment = chosen.choice(MOMENTS)
        if fault == "operator":
            self.switch_and_die(moment, *command)
        elif fault:
            names = list(self.servers)
            start = 2 * SPANS.index(span)
            self._disturb(fault, chosen.choice(names[start : start + 2]), moment, command)
        self.switch(*command)

    def _disturb(self, fault: str, node: str, moment: str, command: tuple[str, ...]) -> None:
        process = self.start("shards", "switch", *command, STOP_AT=moment)
        wait_until_stopped(process)
        if fault == "server":
            self.servers[node].kill()
            go_on(process)
            self.servers[node].start()
        else:
            self.proxies[node].cut()
            go_on(process)
            self.proxies[node].forward()
        self.switch("photos", "--repair")
        done = self.manage("pairs", "rejoin", node)
        assert done.code == 0, done.err

    # ##### The watch #####

    @contextlib.contextmanager
    def watched_pairs(self) -> Iterator[list[str]]:
        """Try all the time to write to both sides of each pair at once, whatever proxies do.

        Yield a list that gets an entry for each attempt that has succeeded: a node, or "both".
        """
        found: list[str] = []
        ended = threading.Event()

        def watch(one: str, other: str, number: int) -> None:
            while not ended.is_set():
                for first, second in ((one, other), (other, one)):
                    with self._open_write(first, number) as mine:
                        if mine is None:
                            continue
                        found.append(first)
                        with self._open_write(second, number) as theirs:
                            if theirs is not None and _lives(mine):
                                found.append("both")

        threads = [
            threading.Thread(target=watch, args=arguments)
            for arguments in (("db1", "db2", 0), ("db3", "db4", 2))
        ]
        for thread in threads:
            thread.start()
        try:
            yield found
        finally:
            ended.set()
            for thread in threads:
                thread.join()

    @contextlib.contextmanager
    def _open_write(self, node: str, number: int) -> Iterator[Any]:
        """Hold a transaction open that has written on ``node``; yield None if that is not possible."""
        with contextlib.ExitStack() as stack:
            try:
                connection = stack.enter_context(
                    contextlib.closing(
                        MySQLdb.connect(
                            host=HOST,
                            port=self.servers[node].port,
                            user=APPLICATION[0],
                            password=APPLICATION[1],
                            autocommit=True,
                        )
                    )
                )
                cursor = connection.cursor()
                cursor.execute("START TRANSACTION")
                cursor.execute(f"INSERT INTO photos_{number:05d}.entries_entry VALUES (-1, 0)")
            except MySQLdb.Error:  # refused, or the server is down
                yield None
            else:
                yield connection
                with contextlib.suppress(MySQLdb.Error):
                    cursor.execute("ROLLBACK")

    def rows_on(self, *nodes: str) -> set[int]:
        return {
            row[0]
            for node in nodes
            for number in range(SHARDS)
            if (number < 2) == (node in ("db1", "db2"))
            for row in execute(
                self.servers[node], f"SELECT entry_id FROM photos_{number:05d}.entries_entry"
            )
        }


def _lives(connection: Any) -> bool:
    """Whether a session still has its transaction: a server that died has ended it."""
    try:
        connection.query("SELECT 1")
        connection.store_result()
    except MySQLdb.Error:
        return False
    return True
