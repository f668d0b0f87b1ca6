"""Times a topology change until the last of 20 processes uses it, through ZooKeeper.

:func:`topology_change` starts the processes. Beside the topology, each of them watches a plain
znode for comparison. All times come from the machine's monotonic clock, which the processes
share.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from kazoo.client import KazooClient

from sharded_orm.topology.document import Document
from sharded_orm.topology.sources.base import OnChange
from sharded_orm.topology.sources.zookeeper import ZooKeeperSource
from tests.benchmarks.report import Line
from tests.benchmarks.site import Site
from tests.benchmarks.timing import Rounds
from tests.services import ServiceMissing, zookeeper

PROCESSES = 20
NODES, SHARDS = 8, 4096
_PATH, _RAW = "/benchmarks", "/raw"


def topology_change(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Time ``operations.topology.change`` until ``runtime.topology()`` is the new topology."""
    what = f"topology change until the last of {PROCESSES} processes uses it"
    with contextlib.ExitStack() as stack:
        try:
            (server,) = stack.enter_context(zookeeper.servers(1))
        except ServiceMissing as exc:
            yield Line(what, "-", f"did not run: {exc}")
            return
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="topology-"))

        def process(role: str) -> _Process:
            return stack.enter_context(_Process(server.hosts, folder, role))

        operator = process("operator")
        operator.answer()
        followers = [process(f"follower {number}") for number in range(PROCESSES)]
        for follower in followers:
            # Both watches report their current content first.
            follower.answer()
            follower.answer()
        seconds_by_order: dict[str, list[list[float]]] = {"change": [], "set": []}
        for number in range(2 * rounds.count):
            order = ("change", "set")[number % 2]
            operator.order(order)
            began = operator.answer()
            seconds_by_order[order].append(
                sorted(follower.answer() - began for follower in followers)
            )
    ours, raw = (_Times(seconds_by_order[order]) for order in ("change", "set"))
    yield Line(
        what,
        f"a plain znode and its watch: median {raw.last}, worst {raw.worst}",
        f"median {ours.last}, worst {ours.worst}",
        detail=f"to the first of them {ours.first} / {raw.first}; {rounds.count} changes",
    )


class _Times:
    """For each change: seconds until each process had it, sorted. Printable as text."""

    def __init__(self, changes: list[list[float]]) -> None:
        self.first = _text(median(one[0] for one in changes))
        self.last = _text(median(one[-1] for one in changes))
        self.worst = _text(max(one[-1] for one in changes))


def _text(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


class _Process:
    """A child process; a context manager."""

    def __init__(self, hosts: str, folder: str, role: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, hosts, folder, role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def order(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()

    def answer(self) -> float:
        assert self._process.stdout is not None
        return float(self._process.stdout.readline())

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.communicate()


# ##### The children #####


class Noted(ZooKeeperSource):
    """A ZooKeeper source that reports when a document is in use."""

    def start(self, on_change: OnChange) -> None:
        def noted(document: Any) -> None:
            on_change(document)
            tell()

        super().start(noted)


def tell() -> None:
    print(time.monotonic(), flush=True)


def configure(hosts: str, folder: str, role: str) -> None:
    import django
    from django.conf import settings

    from sharded_orm.topology.aliases import sharded_databases

    engine = "sharded_orm.backends.sqlite3"
    settings.configure(
        SECRET_KEY="benchmarks",
        DATABASES=sharded_databases({"default": {"ENGINE": engine, "NAME": ":memory:"}}),
        DATABASE_ROUTERS=["sharded_orm.routers.ShardRouter"],
        INSTALLED_APPS=["sharded_orm"],
        SHARDED_ORM={
            "NODES": {
                f"node{number}": {"ENGINE": engine, "NAME": folder} for number in range(NODES)
            },
            "GROUPS": {"photos": {"STRATEGY": "modulo"}},
            "TOPOLOGY": {
                "SOURCE": "zookeeper" if role == "operator" else f"{Noted.__module__}.Noted",
                "OPTIONS": {
                    "HOSTS": hosts,
                    "PATH": _PATH,
                    "LAST_GOOD": str(Path(folder) / f"{role}.json"),
                },
            },
        },
    )
    django.setup()


def first() -> Document:
    size = SHARDS // NODES
    ranges = [
        {"range": [number * size, number * size + size - 1], "primary": f"node{number}"}
        for number in range(NODES)
    ]
    return Document(1, {}, {"photos": {"RANGES": ranges}})


def operate(client: KazooClient) -> None:
    from sharded_orm.operations import topology

    tell()

    def promoted(before: Document) -> Document:
        content = before.content()
        one, other = content["groups"]["photos"]["RANGES"][:2]
        one["primary"], other["primary"] = other["primary"], one["primary"]
        return Document.from_content(content)

    for line in sys.stdin:
        tell()
        if line == "change\n":
            topology.change(promoted)
        else:
            client.set(_RAW, first().to_json().encode())


def follow(client: KazooClient) -> None:
    from sharded_orm import runtime

    runtime.topology()
    client.DataWatch(_RAW, lambda data, stat: tell())
    sys.stdin.read()


def main(hosts: str, folder: str, role: str) -> None:
    client = KazooClient(hosts)
    client.start()
    try:
        if role == "operator":
            client.create(f"{_PATH}/current", first().to_json().encode(), makepath=True)
            client.create(_RAW)
            configure(hosts, folder, role)
            operate(client)
        else:
            configure(hosts, folder, role)
            follow(client)
    finally:
        client.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
