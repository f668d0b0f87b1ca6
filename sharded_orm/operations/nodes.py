"""Asking several nodes, which are the database servers in ``NODES``, in parallel.

A node that is down delays no other node.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import Error, OperationalError, connections
from django.db.utils import load_backend

from sharded_orm import runtime
from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.exceptions import ShardedOrmError
from sharded_orm.topology.aliases import complete
from sharded_orm.topology.model import Shard

T = TypeVar("T")

#: Errors that a node may cause; any other error is a bug of this library.
TROUBLE = (Error, ShardedOrmError, ImproperlyConfigured, OSError)

#: Abandoned threads per node: threads that still wait for the node although nobody waits for them.
#: The limit keeps a node that hangs from getting one more thread with each question.
MAX_ABANDONED = 20

Alive = Callable[[], None]
_ALIVE: Any = object()
# (kind, name) -> its abandoned threads. A node and a service may have the same name.
_abandoned: dict[tuple[str, str], set[threading.Thread]] = {}


class NoAnswer(OperationalError):
    """No answer came in time; the operation may still take effect."""


def ignore_answer() -> None:
    """An ``alive`` callback for callers that wait only for the whole answer."""


@contextmanager
def node_connection(name: str) -> Iterator[ShardConnectionMixin]:
    """A connection object of node ``name`` without a shard; closed at the end of the block.

    Belongs to the thread that creates it. Connects at first use.
    """
    # No schema has an empty name. SQLite still finds the folder of its files by it.
    settings = runtime.database_settings(Shard("", 0, name, None, ""))
    del settings["SHARD"]
    wrapper: ShardConnectionMixin = load_backend(settings["ENGINE"]).DatabaseWrapper(
        complete(settings), f"node {name}"
    )
    try:
        yield wrapper
    finally:
        wrapper.close()


def ask_nodes(
    nodes: Iterable[str],
    ask: Callable[[str, Alive], T],
    *,
    patience: float,
    silence: float | None = None,
    kind: str = "node",
) -> dict[str, T | Exception]:
    """Call ``ask(node, alive)`` for each of ``nodes``, all at the same time.

    Each call runs in a thread of its own, whose connections are closed at its end. The call runs
    ``alive()`` whenever its node has answered. If a node is silent for too long, its thread is
    abandoned. A node with :data:`MAX_ABANDONED` abandoned threads is not asked.

    :param nodes: names of nodes, or of services.
    :param patience: seconds until the first answer.
    :param silence: seconds between two later answers; None for no limit.
    :param kind: "node" or "service".
    :return: node -> the result of its call, or the node's error.
    :raises: an exception of ``ask`` that is not a node's error (:data:`TROUBLE`).
    """
    events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def run(node: str) -> None:
        try:
            outcome: Any = ask(node, lambda: events.put((node, _ALIVE)))
        except Exception as exc:
            # The waiting thread raises it, unless it is the node's error.
            outcome = exc
        finally:
            connections.close_all()
        events.put((node, outcome))

    order = list(dict.fromkeys(nodes))
    limits: dict[str, float] = dict.fromkeys(order, patience)
    deadlines = dict.fromkeys(order, time.monotonic() + patience)
    answers: dict[str, T | Exception] = {}
    threads: dict[str, threading.Thread] = {}
    for node in order:
        if _count_abandoned(kind, node) >= MAX_ABANDONED:
            events.put(
                (node, OperationalError(f"{MAX_ABANDONED} earlier questions have no answer yet"))
            )
            continue
        # Not from a pool: the process would wait for its threads at exit.
        threads[node] = threading.Thread(
            target=run, args=(node,), name=f"{kind} {node}", daemon=True
        )
        threads[node].start()
    while deadlines:
        soonest = min(deadlines, key=deadlines.__getitem__)
        seconds = deadlines[soonest] - time.monotonic()
        try:
            node, outcome = events.get(timeout=None if seconds == float("inf") else max(seconds, 0))
        except queue.Empty:
            del deadlines[soonest]
            answers[soonest] = NoAnswer(f"no answer within {limits[soonest]:g} seconds")
            if soonest in threads:
                _abandoned.setdefault((kind, soonest), set()).add(threads[soonest])
            continue
        if node not in deadlines:
            continue
        if outcome is _ALIVE:
            limits[node] = float("inf") if silence is None else silence
            deadlines[node] = time.monotonic() + limits[node]
            continue
        if isinstance(outcome, Exception) and not isinstance(outcome, TROUBLE):
            raise outcome
        del deadlines[node]
        answers[node] = outcome
    return {node: answers[node] for node in order}


def ask_one(service: str, ask: Callable[[], T], *, within: float) -> T:
    """Return the result of ``ask()``, which runs in a thread of its own as in :func:`ask_nodes`.

    :param service: the service's name, such as ``"the directory"``.
    :param within: seconds until the answer.
    :raises NoAnswer: no answer came; the thread of ``ask`` is abandoned.
    :raises: any exception of ``ask``.
    """
    answers = ask_nodes([service], lambda name, alive: ask(), patience=within, kind="service")
    outcome = answers[service]
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _count_abandoned(kind: str, name: str) -> int:
    """The number of abandoned threads of ``name``. Forgets threads that have ended."""
    threads = _abandoned.get((kind, name), set())
    for thread in tuple(threads):  # An atomic copy: other threads add to the set.
        if not thread.is_alive():
            threads.discard(thread)
    return len(threads)
