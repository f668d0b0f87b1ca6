"""Counts the server's connections after all threads have used all shards."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import MySQLdb
from django.db import connections

from tests.benchmarks.models import Photo, Plain
from tests.benchmarks.report import Line
from tests.benchmarks.site import Site
from tests.benchmarks.timing import Rounds
from tests.services.mariadb import Address

THREADS = 8


def connections_held(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Count connections on the server (``Threads_connected``), beyond those open at the start."""
    from sharded_orm.backends.pool import pools

    # Idle connections of earlier subjects must not be counted or reused.
    for pool in pools():
        pool.dispose()

    def touch_ours(number: int) -> None:
        user, pk = site.photo(number)
        Photo.objects.get(user_id=user, pk=pk)

    def touch_stock(number: int) -> None:
        _, pk = site.photo(number)
        Plain.objects.using(site.stock(f"photos_{number:05d}")).get(pk=pk)

    def close_stock() -> None:
        for number in range(site.shards):
            connections[site.stock(f"photos_{number:05d}")].close()

    ours = _held(site, touch_ours, lambda: connections["photos"].close())
    stock = _held(site, touch_stock, close_stock)
    yield Line(
        f"connections after {THREADS} threads touched {site.shards} shards",
        f"stock: {stock} (of {THREADS * site.shards})",
        f"{ours}",
        f"<= {THREADS}",
        ours <= THREADS,
    )


def _held(site: Site, touch: Callable[[int], None], close: Callable[[], None]) -> int:
    assert isinstance(site.address, Address)
    monitor = MySQLdb.connect(**site.address.mysqldb())

    def connected() -> int:
        cursor = monitor.cursor()
        cursor.execute("SHOW STATUS LIKE 'Threads_connected'")
        return int(cursor.fetchone()[1])

    touched, counted = threading.Barrier(THREADS + 1), threading.Event()

    def work(thread: int) -> None:
        try:
            for number in range(site.shards):
                # The threads are not in step, like those of a web server.
                touch((number + thread * site.shards // THREADS) % site.shards)
            touched.wait()
            counted.wait()
        except BaseException:
            touched.abort()
            raise
        finally:
            close()

    before = _settled(connected)
    with ThreadPoolExecutor(THREADS) as executor:
        futures = [executor.submit(work, thread) for thread in range(THREADS)]
        held = 0
        with contextlib.suppress(threading.BrokenBarrierError):  # a thread failed: see below
            touched.wait()
            held = connected() - before
        counted.set()
        for future in futures:
            future.result()
    monitor.close()
    return held


def _settled(count: Callable[[], int]) -> int:
    # The server notices a closed client only after a while.
    while True:
        first = count()
        time.sleep(0.2)
        if count() == first:
            return first
