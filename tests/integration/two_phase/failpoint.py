"""Acts before or after one of the packets that a process sends to its servers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import psycopg

from sharded_orm.backends.mysql.session import NodeSession
from sharded_orm.backends.pool import pools
from sharded_orm.backends.two_phase import old_decisions
from sharded_orm.two_phase import branch_watch


class Failpoint:
    """Counts the packets of this process, and calls ``act`` once.

    :param point: the number of the moment: 0 is before the first packet, 1 is after it, 2 is before the
        second one, and so on.
    """

    def __init__(self, point: int, act: Callable[[], object]) -> None:
        self.point = point
        self.act = act
        self.passed = 0

    def packet(self, send: Callable[[], Any]) -> Any:
        self._pass()
        try:
            return send()
        finally:
            self._pass()

    def _pass(self) -> None:
        moment, self.passed = self.passed, self.passed + 1
        if moment == self.point:
            self.act()


@contextmanager
def failpoint(point: int, act: Callable[[], object]) -> Iterator[Failpoint]:
    """Act at a moment of the block. All sessions of the pools are opened anew.

    A packet that is due at a certain time is not sent in the block, so each run has the same moments.
    """
    counter = Failpoint(point, act)
    wait = psycopg.Connection.wait
    init = NodeSession.__init__

    def counted_wait(connection: Any, *args: Any, **kwargs: Any) -> Any:
        return counter.packet(lambda: wait(connection, *args, **kwargs))

    def counted_init(session: Any, *args: Any, **kwargs: Any) -> None:
        init(session, *args, **kwargs)
        query = session.query
        # The answer is read with the packet, so that "after" means that the server has executed it.
        session.query = lambda statement: counter.packet(lambda: query(statement))

    _dispose_sessions()
    with (
        _nothing_due(),
        mock.patch.object(NodeSession, "__init__", counted_init),
        mock.patch.object(psycopg.Connection, "wait", counted_wait),
    ):
        try:
            yield counter
        finally:
            _dispose_sessions()


@contextmanager
def _nothing_due() -> Iterator[None]:
    """Delete no old decision, and search only for branches that a transaction has just left.

    Otherwise the number of packets would depend on the time. So no process is killed in the deletion of
    old decisions, nor in a search that is due by the clock.
    """
    watch = branch_watch.watch
    due = watch._next
    # 0.0 says that a branch may be left.
    watch._next = math.inf if due else 0.0
    with (
        mock.patch.object(branch_watch, "INTERVAL", math.inf),
        mock.patch.object(old_decisions, "KEPT_FOR", math.inf),
    ):
        try:
            yield
        finally:
            watch._next = min(watch._next, due)


def _dispose_sessions() -> None:
    for pool in pools():
        pool.dispose()
