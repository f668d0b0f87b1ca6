"""A process that runs one order at a time, and stops at the points that the order names."""

from __future__ import annotations

import functools
import os
import random
import traceback
from collections.abc import Callable
from typing import Any

from tests.integration.cache.faults import failpoints
from tests.integration.cache.faults.databases import FaultDatabase, database_at
from tests.integration.cache.faults.process_setup import OWNERS, ProcessSetup
from tests.integration.cache.faults.staleness import Question, StalenessChecker
from tests.patience import PATIENCE
from tests.python_process import CONTEXT


class Stopper:
    """Stops at the points of the last order until the test lets the process go on."""

    def __init__(self, orders: Any, database: FaultDatabase) -> None:
        self._orders, self._database = orders, database
        self.stops: list[str] = []

    def __call__(self, point: str) -> None:
        # Each point once, in the order of the list.
        if self.stops and point == self.stops[0]:
            self.stops.pop(0)
            self._orders.send(("at", point))
            if self._orders.recv() == "commit without waiting":
                self._database.send_commit_and_die()


def run_client(setup: ProcessSetup, orders: Any) -> None:
    """Run orders until the test ends; runs in the client's process."""
    try:
        setup.begin(writes=True)
        _obey(setup, orders)
    except (EOFError, BrokenPipeError, ConnectionError):
        return  # nobody gives orders any more
    except Exception:  # the test must get any error
        orders.send(("failure", traceback.format_exc()))


def _obey(setup: ProcessSetup, orders: Any) -> None:
    from tests.integration.cache.faults.rows import ALIASES, Owner, transact
    from tests.integration.cache.faults.writers import outcome

    database = database_at(setup.address)
    stopper = Stopper(orders, database)
    failpoints.set_handler(stopper)
    failpoints.watch_queries(ALIASES)
    checker = StalenessChecker(setup.address)
    owners = [Owner(number) for number in OWNERS]
    dice = random.Random(os.getpid())
    orders.send(("ready", None))
    while True:
        kind, what, stops = orders.recv()
        stopper.stops = []
        if kind == "write":
            number, lane, name, keep = what
            owner = owners[number]
            work = _work(orders, stopper, owner, lane, name, dice, stops, database)
            write = functools.partial(transact, (owner,), (lane,), work, keep=keep)
            orders.send(("done", outcome(write)))
        else:
            before = checker.truth(what.owner)
            stopper.stops = list(stops)
            answer = what.ask(owners[what.owner].rows())
            stopper.stops = []
            orders.send(("done", checker.problem(what, answer, before)))


def _work(
    orders: Any,
    stopper: Stopper,
    owner: Any,
    lane: int,
    name: str,
    dice: random.Random,
    stops: Any,
    database: FaultDatabase,
) -> Callable[[], None]:
    from django.db import connections

    def work() -> None:
        with connections[owner.alias].cursor() as cursor:
            cursor.execute(f"SELECT {database.session_number}")
            ((session,),) = cursor.fetchall()
        orders.send(("session", session))
        getattr(owner, name)(lane, dice)
        stopper.stops = list(stops)

    return work


class SteppedClient:
    """The test's handle of such a process."""

    def __init__(self, setup: ProcessSetup) -> None:
        self._orders, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=run_client, args=(setup, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self._ready = False
        self.session = 0
        #: The result of the last order; None while it is running.
        self.result: Any = None

    def write(self, owner: int, lane: int, work: str, *stops: str, keep: bool = True) -> bool:
        """Begin a transaction. Return whether it reaches the first of ``stops``, not its end."""
        self._order("write", (owner, lane, work, keep), stops)
        self.session = self._answer("session")
        return self.reaches()

    def read(self, question: Question, *stops: str) -> bool:
        """Begin a cached read. Return whether it reaches the first of ``stops``, not its end."""
        self._order("read", question, stops)
        return self.reaches()

    def go_on(self) -> bool:
        """Go on from a point. Return whether it reaches the next point, not its end."""
        self._orders.send("go on")
        return self.reaches()

    def finish(self) -> Any:
        """Go on to the end and return the result."""
        while self.go_on():
            pass
        return self.result

    def commit_and_die(self) -> None:
        """Go on from before COMMIT; the process is killed as soon as COMMIT is sent."""
        self._orders.send("commit without waiting")
        self.process.join(PATIENCE)
        assert not self.lives

    def kill(self) -> None:
        """Send SIGKILL, wherever the process is."""
        self.process.kill()
        self.process.join(PATIENCE)

    def release(self) -> None:
        """Let the process go on without waiting for it."""
        self._orders.send("go on")

    def reaches(self) -> bool:
        """Wait, and return whether the process reaches a point, not its end."""
        kind, what = self._receive()
        if kind == "done":
            self.result = what
        return kind == "at"

    @property
    def lives(self) -> bool:
        return bool(self.process.is_alive())

    def _order(self, *order: Any) -> None:
        if not self._ready:
            self._answer("ready")
            self._ready = True
        self.result = None
        self._orders.send(order)

    def _answer(self, expected: str) -> Any:
        kind, what = self._receive()
        assert kind == expected, f"{kind} instead of {expected}: {what}"
        return what

    def _receive(self) -> Any:
        assert self._orders.poll(PATIENCE), "a client does not answer"
        kind, what = self._orders.recv()
        assert kind != "failure", what
        return kind, what

    def close(self) -> None:
        self.kill()
        self._orders.close()
