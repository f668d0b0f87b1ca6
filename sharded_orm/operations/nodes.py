"""Query several nodes (the database servers in ``NODES``) in parallel.

If a node is down, the others are queried without delay.
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

from sharded_orm import database_settings
from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.exceptions import ShardedOrmError
from sharded_orm.topology.aliases import complete
from sharded_orm.topology.model import Shard

T = TypeVar("T")

#: Errors that a node can cause. Any other error is a bug in this library.
TROUBLE = (Error, ShardedOrmError, ImproperlyConfigured, OSError)

#: The largest number of abandoned threads per node. An abandoned thread still waits for the node's
#: answer, but its caller has given up. Each query to a hanging node leaves one more such thread. A
#: node with this many is not queried until one of them has ended.
MAX_ABANDONED = 20

Alive = Callable[[], None]
_ALIVE: Any = object()
# Threads whose callers have given up, and that still wait for a node or service. The keys are pairs
# (kind, name), such as ("node", "db1"), because a node and a service may have the same name.
_abandoned: dict[tuple[str, str], set[threading.Thread]] = {}


class NoAnswer(OperationalError):
    """A node or service has not answered in time.

    A statement that was sent to it may still take effect.
    """


def ignore_answer() -> None:
    """Do nothing. Pass this function as ``alive`` if an answer must not extend the time limit.

    Code that queries a node calls ``alive`` after each answer. Usually, the call extends the limit.
    """


@contextmanager
def node_connection(name: str) -> Iterator[ShardConnectionMixin]:
    """A context manager that yields a connection object of node ``name``, and closes it at the end.

    The connection belongs to no shard. Only the thread that has created it may use it. The node is
    contacted at the first query.

    :raises ImproperlyConfigured: the driver refuses the settings of the node.
    """
    # Invent a shard without a schema on this node, and use its settings. On SQLite, NAME is then a
    # file in the node's folder that no shard uses.
    settings = database_settings.shard_settings(Shard("", 0, name, None, ""))
    del settings["SHARD"]
    wrapper: ShardConnectionMixin = load_backend(settings["ENGINE"]).DatabaseWrapper(
        complete(settings), f"node {name}"
    )
    wrapper.check_without_server()
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
    """Call ``ask(node, alive)`` for each of ``nodes``, all at the same time, and wait for the
    results.

    Each call runs in a new thread. When the thread ends, its Django connections are closed. ``ask``
    must call ``alive()`` each time its node has answered. If a node is silent for too long, its
    thread is abandoned: the thread may go on, but its result is ignored. If a node already has
    :data:`MAX_ABANDONED` abandoned threads, ``ask`` is not called for it.

    :param nodes: names of nodes, of services, or of pairs of servers.
    :param patience: seconds to wait for a node's first answer.
    :param silence: seconds to wait for each later answer; None for no limit.
    :param kind: what ``nodes`` are: "node", "service" or "pair".
    :return: maps each node to the result of ``ask``, or to the exception that the node has caused:
        one of :data:`TROUBLE`, or :class:`NoAnswer` if the node was silent for too long.
    :raises: any other exception of ``ask``.
    """
    events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def run(node: str) -> None:
        try:
            outcome: Any = ask(node, lambda: events.put((node, _ALIVE)))
        except Exception as exc:
            # Hand the exception to the thread that waits for the results. That thread raises it,
            # unless the node has caused it (TROUBLE).
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
        # Do not use a thread pool. A process that ends waits for all threads of its pools, and so
        # it would wait for abandoned threads.
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
    """Call ``ask()`` in a new thread, as :func:`ask_nodes` does, and return the result.

    :param service: the service's name, such as ``"the directory"``.
    :param within: seconds to wait for the result.
    :raises NoAnswer: there is no result in time. The thread of ``ask`` is abandoned: it may go on.
    :raises: any exception of ``ask``.
    """
    answers = ask_nodes([service], lambda name, alive: ask(), patience=within, kind="service")
    outcome = answers[service]
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _count_abandoned(kind: str, name: str) -> int:
    """Return how many abandoned threads of the node or service ``name`` still run.

    An abandoned thread waits for an answer although its caller has given up. Threads that have
    ended meanwhile are forgotten.
    """
    threads = _abandoned.get((kind, name), set())
    # tuple() makes a copy at one stroke, because other threads may add to the set meanwhile.
    for thread in tuple(threads):
        if not thread.is_alive():
            threads.discard(thread)
    return len(threads)
