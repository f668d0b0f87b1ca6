"""Times Django's work around each request, whose cost may depend on the number of databases.

:func:`request_signals` starts two processes, one per project, because a process cannot
exchange its settings. Each reads ``run N`` from its standard input and answers with the
seconds that N requests took.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from tests.benchmarks.database import DATABASES
from tests.benchmarks.report import Line, at_most
from tests.benchmarks.site import CONFIGURED, Site, configure
from tests.benchmarks.timing import Rounds, summary

FEW = 8
REQUESTS = 200


def request_signals(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Time signals and ``make_view_atomic`` of a request, against a project with one database."""
    what = f"request signals, {CONFIGURED} shards configured, {FEW} touched"
    for busy in (False, True):
        pairs = []
        with _Project(site, "sharded", busy) as ours, _Project(site, "one", busy) as stock:
            for _ in range(rounds.count):
                pairs.append((ours.run(rounds.of(REQUESTS)), stock.run(rounds.of(REQUESTS))))
        suffix = " in each request" if busy else ", one of them in each request"
        yield at_most(2.0, what + suffix, "one database, used", summary(pairs), goal=not busy)


class _Project:
    """A child process with a project of its own."""

    def __init__(self, site: Site, kind: str, busy: bool) -> None:
        where = [site.database.name, json.dumps(vars(site.address)), site.prefix]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *where, kind, str(FEW if busy else 1)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, requests: int) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"run {requests}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline()) / requests

    def __enter__(self) -> _Project:
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main(database: str, address: str, prefix: str, kind: str, touched: str) -> None:
    sharded = kind == "sharded"
    # One group: Django iterates over groups, which costs about 8 us per group and request.
    groups = ("photos",) if sharded else ()
    measured = DATABASES[database]
    configure(measured, measured.address(json.loads(address)), prefix, CONFIGURED, groups)
    from django.core.handlers.base import BaseHandler
    from django.core.signals import request_finished, request_started
    from django.db import connections

    def view() -> None: ...

    make_view_atomic: Any = BaseHandler().make_view_atomic

    def touch(alias: str) -> None:
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT 1")

    few = [f"photos_{number:05d}" for number in range(FEW)] if sharded else ["default"]
    for alias in ["default", *few]:
        touch(alias)
    used = few[: int(touched)]
    for line in sys.stdin:
        seconds = 0.0
        for _ in range(int(line.split()[1])):
            # The work of the view is the same for both and is not measured.
            for alias in used:
                touch(alias)
            began = time.perf_counter()
            request_started.send(sender=BaseHandler, environ={})
            make_view_atomic(view)
            request_finished.send(sender=BaseHandler)
            seconds += time.perf_counter() - began
        print(seconds, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
