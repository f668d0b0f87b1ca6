"""Asking nodes side by side, each for itself: one that is down keeps nobody back."""

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

#: What a node may be to blame for; anything else is a mistake of ours.
TROUBLE = (Error, ShardedOrmError, ImproperlyConfigured, OSError)

#: Threads that may wait for one node after nobody waits for them any more: a node that hangs is not
#: given one more each time somebody looks.
MAX_ABANDONED = 20

Alive = Callable[[], None]
_ALIVE: Any = object()
# What is asked -> the threads that were left waiting for it. A name may be a node's and a service's.
_abandoned: dict[tuple[str, str], set[threading.Thread]] = {}


class NoAnswer(OperationalError):
    """It did not come in time; what was asked for may still happen."""


def ignore_answer() -> None:
    """``alive`` for who waits for the whole, and is not told of its parts."""


@contextmanager
def node_connection(name: str) -> Iterator[ShardConnectionMixin]:
    """A connection object of node ``name`` that is on no shard, closed at the end.

    For the thread that makes it. Connects when it is first used.
    """
    # The name of a schema that there is not: SQLite takes the folder from it.
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
    """What ``ask(node, alive)`` tells for each of ``nodes``, all at the same time.

    Each runs in a thread of its own, whose connections are closed at its end, and calls
    ``alive()`` whenever its node has answered. A node that is silent for too long is not
    waited for: its thread is left to end by itself. Where :data:`MAX_ABANDONED` were left, no more begin.

    :param nodes: names of nodes, or of what else ``kind`` says.
    :param patience: seconds for the first answer.
    :param silence: seconds between two later ones; None for any length.
    :return: node -> what it told, or what it is to blame for.
    """
    events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def run(node: str) -> None:
        try:
            outcome: Any = ask(node, lambda: events.put((node, _ALIVE)))
        except Exception as exc:
            # Raised in the thread that waits, if it is not the node's fault.
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
        # Not of a pool, whose threads the end of the process would wait for.
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
    """What ``ask()`` tells, in a thread of its own, as :func:`ask_nodes` does it.

    :param service: what is asked, whatever it is: ``"the directory"``.
    :param within: seconds.
    :raises NoAnswer: none came; ``ask`` goes on by itself.
    :raises: what ``ask`` raises.
    """
    answers = ask_nodes([service], lambda name, alive: ask(), patience=within, kind="service")
    outcome = answers[service]
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _count_abandoned(kind: str, name: str) -> int:
    """How many threads wait for ``name`` though nobody waits for them. Forgets those that ended."""
    threads = _abandoned.get((kind, name), set())
    for thread in tuple(threads):  # One step: others add theirs meanwhile.
        if not thread.is_alive():
            threads.discard(thread)
    return len(threads)
