"""Work on many shards in waves: first on a few shards, the *canary*, then on the others.

Within a wave, the work is spread evenly over the nodes (database servers).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, zip_longest

from django.db import connections

from sharded_orm.operations.exceptions import InvalidWaves
from sharded_orm.topology.model import Shard

# The number of seconds between two looks at the flag that ends a pause early.
_CHECK_INTERVAL = 0.1


@dataclass(frozen=True)
class Waves:
    """The order in which shards are worked on, how many at once, and when to stop."""

    #: Number of shards in the first wave, the canary. If one of them fails, no other wave is begun.
    #: 0 means that there is no canary.
    canary: int = 1
    #: Number of shards that are worked on at once, per node.
    parallel: int = 4
    #: Number of shards in each wave after the canary, on all nodes together. None means that one
    #: wave has all remaining shards.
    size: int | None = None
    #: Seconds to wait between two waves.
    pause: float = 0.0
    #: The work stops when more shards than this number have failed: no other shard is begun. None
    #: means that it never stops for this reason.
    max_failures: int | None = None

    def __post_init__(self) -> None:
        for name, minimum in (
            ("canary", 0), ("parallel", 1), ("size", 1), ("pause", 0), ("max_failures", 0)
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise InvalidWaves(f"{name} must be at least {minimum}, not {value!r}")

    def cut(self, shards: Sequence[Shard]) -> Iterator[Sequence[Shard]]:
        """Divide ``shards`` into waves. Within a wave, shards of different nodes alternate."""
        nodes: dict[str, list[Shard]] = {}
        for shard in shards:
            nodes.setdefault(shard.node, []).append(shard)
        turns = chain.from_iterable(zip_longest(*nodes.values()))
        ordered = [shard for shard in turns if shard is not None]
        first = min(self.canary, len(ordered))
        if first:
            yield ordered[:first]
        size = self.size or len(ordered) or 1
        for start in range(first, len(ordered), size):
            yield ordered[start : start + size]


class Stopping:
    """A flag that says whether to stop working, and why. Call the object to read the flag.

    The class uses no lock, because signal handlers call :meth:`stop`. With a lock, a signal handler
    could interrupt the code that holds the lock, and then wait for it for ever.
    """

    def __init__(self) -> None:
        self.cause = ""

    def __call__(self) -> bool:
        return bool(self.cause)

    def stop(self, cause: str) -> None:
        """Set the flag, so that all work stops. If it is set already, the first cause stays.

        :param cause: a text, such as "stopped by SIGTERM".
        """
        self.cause = self.cause or cause

    def wait(self, seconds: float) -> None:
        """Wait for ``seconds``, or until :meth:`stop` is called."""
        until = time.monotonic() + seconds
        while not self() and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _CHECK_INTERVAL))


def work_through(
    shards: Sequence[Shard],
    work: Callable[[Shard], bool],
    waves: Waves,
    stopping: Stopping,
) -> None:
    """Call ``work`` for each shard, wave by wave, in ``waves.parallel`` threads per node.

    :param work: works on one shard, and returns whether it has succeeded. If it raises an
        exception, no other shard is begun. When all threads have ended, this function raises the
        exception.
    :param stopping: a flag. When it is set, no other shard is begun, and ``work`` should end soon.
        This function sets it if the first wave, the canary, fails or too many shards fail.

    At the end of each wave, the connections of the worker threads are closed.
    """
    failures = _Failures(waves, stopping)
    workers_at_most = waves.parallel * len({shard.node for shard in shards})
    with ThreadPoolExecutor(
        max(workers_at_most, 1), thread_name_prefix="sharded_orm wave"
    ) as threads:
        for number, wave in enumerate(waves.cut(shards)):
            if number and waves.pause:
                stopping.wait(waves.pause)
            if stopping():
                return
            queues: dict[str, deque[Shard]] = {}
            for shard in wave:
                queues.setdefault(shard.node, deque()).append(shard)
            workers = [
                threads.submit(_worker, queue, work, failures, stopping)
                for queue in queues.values()
                for _ in range(min(waves.parallel, len(queue)))
            ]
            for worker in workers:
                # exception() waits for a thread, but raises nothing. So all threads have ended
                # before result() raises the error of one of them.
                worker.exception()
            for worker in workers:
                worker.result()
            is_canary = number == 0 and waves.canary > 0 and len(wave) < len(shards)
            failures.end_of_wave(is_canary=is_canary)


class _Failures:
    def __init__(self, waves: Waves, stopping: Stopping) -> None:
        self._waves = waves
        self._stopping = stopping
        self._count = 0
        self._lock = threading.Lock()

    def add(self) -> None:
        with self._lock:
            self._count += 1
        limit = self._waves.max_failures
        if limit is not None and self._count > limit:
            self._stopping.stop(f"more than {limit} shard{'s' if limit != 1 else ''} failed")

    def end_of_wave(self, *, is_canary: bool) -> None:
        if self._count and is_canary:
            self._stopping.stop("the canary failed")


def _worker(
    queue: deque[Shard],
    work: Callable[[Shard], bool],
    failures: _Failures,
    stopping: Stopping,
) -> None:
    try:
        while not stopping():
            try:
                shard = queue.popleft()
            except IndexError:
                return
            if not work(shard):
                failures.add()
    except BaseException as exc:
        stopping.stop(f"{type(exc).__name__}")
        raise
    finally:
        connections.close_all()
