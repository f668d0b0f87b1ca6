"""A process that draws ids on request."""

from __future__ import annotations

import io
import logging
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.integration.tickets.faults.project import Project
from tests.patience import PATIENCE
from tests.python_process import CONTEXT

_SECONDS_BEFORE_INTERRUPTION = 0.3


def _obey(project: Project, orders: Any) -> None:
    project.configure()
    generator = project.generator()
    messages: list[str] = []
    logger = logging.getLogger("sharded_orm.tickets")
    logger.setLevel(logging.INFO)
    listener = logging.Handler()
    listener.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(listener)
    work = {
        "take": lambda *order: list(generator.take(*order)),
        "threads": lambda *order: _in_threads(generator, *order),
        "interrupt": lambda sequence: _interrupted(generator, sequence),
        "manage": _manage,
    }
    while True:
        try:
            kind, *order = orders.recv()
        except EOFError:
            return
        try:
            answer = work[kind](*order)
        except Exception as exc:
            answer = Refused(type(exc).__name__, str(exc))
        orders.send((answer, messages[:]))
        del messages[:]


def _in_threads(generator: Any, sequence: str, threads: int) -> list[int]:
    together = threading.Barrier(threads)

    def draw(_: int) -> int:
        together.wait(PATIENCE)
        return int(generator.next(sequence))

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(draw, range(threads)))


class Interruption(Exception):
    """Raised by a signal handler in the middle of any code, as some task queues do."""


def _interrupted(generator: Any, sequence: str) -> list[int]:
    def interrupt(number: int, frame: Any) -> None:
        raise Interruption

    ids = []
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, _SECONDS_BEFORE_INTERRUPTION)
    try:
        while True:
            ids.append(generator.next(sequence))
    except Interruption:
        return ids


def _manage(*arguments: str) -> str:
    from django.core.management import call_command

    output = io.StringIO()
    call_command(*arguments, stdout=output, stderr=output)
    return output.getvalue()


@dataclass
class Refused(Exception):
    """The exception that a call in another process has raised."""

    kind: str
    message: str


class TicketClient:
    """The handle of a process that draws ids on request. Each process has its own blocks of ids."""

    def __init__(self, project: Project) -> None:
        self._orders, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_obey, args=(project, theirs), daemon=True)
        self._process.start()
        theirs.close()
        #: All its log messages.
        self.log: list[str] = []
        #: The ids that it got.
        self.ids: list[int] = []

    def take(self, sequence: str, count: int = 1) -> list[int]:
        """Draw ids.

        :raises Refused: the process raised an exception.
        """
        ids: list[int] = self._order("take", sequence, count)
        self.ids += ids
        return ids

    def take_in_threads(self, sequence: str, threads: int) -> list[int]:
        """Draw one id in each of ``threads`` threads at the same time."""
        ids: list[int] = self._order("threads", sequence, threads)
        self.ids += ids
        return ids

    def be_interrupted(self, sequence: str) -> None:
        """Draw ids until a signal handler raises an exception, in the middle of a request."""
        self.ids += self._order("interrupt", sequence)

    def manage(self, *arguments: str) -> str:
        """Run a command of ``manage.py`` and return its output.

        :raises Refused: the command ended with an error.
        """
        return str(self._order("manage", *arguments))

    def _order(self, *order: Any) -> Any:
        self._orders.send(order)
        assert self._orders.poll(PATIENCE), f"no answer to {order!r}"
        answer, messages = self._orders.recv()
        self.log += messages
        if isinstance(answer, Refused):
            raise answer
        return answer

    def take_from(self, place: int, sequence: str, count: int = 1) -> None:
        """Draw ids until one comes from that server, which is soon if all servers are well."""
        end = time.monotonic() + PATIENCE
        while (self.take(sequence, count)[0] - 1) % 2 != place:
            assert time.monotonic() < end, f"server {place + 1} does not serve: {self.log!r}"

    def close(self) -> None:
        self._orders.close()
        self._process.join(PATIENCE)

    def __enter__(self) -> TicketClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
