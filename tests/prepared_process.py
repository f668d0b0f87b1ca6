"""Programs in processes that are forked from one in which Django is set up.

Most of the processor time of a short command goes into the imports of Django's apps and of the
library's commands. Here one process does that for all programs with the same apps.

Not for tests of what a process does when it starts, nor for programs that use :mod:`multiprocessing`.
"""

from __future__ import annotations

import atexit
import os
import pickle
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import NoReturn

from tests.garbage import keep_all
from tests.python_process import CONTEXT, Program

# Of a program: its code, arguments and environment.
_MOST_BYTES = 1 << 18
_BYTES_OF_NUMBER = 8


@cache
def prepared_by(prepare: Callable[..., None], *arguments: str) -> PreparedProcess:
    """Return the process that has called ``prepare`` with ``arguments``; one until the tests end."""
    process = PreparedProcess(partial(prepare, *arguments))
    atexit.register(process.close)
    return process


class PreparedProcess:
    """A process that calls ``prepare``, and then forks for each program.

    :param prepare: a function that can be pickled. It leaves no thread and no open connection.
    """

    def __init__(self, prepare: Callable[[], None]) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = CONTEXT.Process(target=_Server(prepare, other))
            self._process.start()

    def fork(self, program: Program, streams: Sequence[int]) -> ForkedProcess:
        """Start ``program`` with these descriptors as its standard streams."""
        own_end, end_of_status = os.pipe()
        message = pickle.dumps(program)
        assert len(message) < _MOST_BYTES
        try:
            socket.send_fds(self._socket, [message], [*streams, end_of_status])
        finally:
            os.close(end_of_status)
        return ForkedProcess(own_end)

    def close(self) -> None:
        """End the process. Programs that still run go on, but their exit status is lost."""
        self._socket.close()
        self._process.join()


class ForkedProcess:
    """One program, with the methods of a process of :mod:`multiprocessing` that tests use.

    Used by one thread at a time.
    """

    def __init__(self, status: int) -> None:
        self._status = status
        self._exitcode: int | None = None
        pid = self._number()
        assert pid is not None, "the prepared process has ended; its error is above"
        self.pid = pid

    @property
    def exitcode(self) -> int | None:
        self.join(0)
        return self._exitcode

    def join(self, timeout: float | None = None) -> None:
        if self._exitcode is None and select.select([self._status], [], [], timeout)[0]:
            number = self._number()
            self._exitcode = 255 if number is None else number
            os.close(self._status)

    def _number(self) -> int | None:
        data = os.read(self._status, _BYTES_OF_NUMBER)
        return int.from_bytes(data, "little", signed=True) if data else None


class _Server:
    """What the prepared process does: it tells the process id of each program, and its exit status."""

    def __init__(self, prepare: Callable[[], None], requests: socket.socket) -> None:
        self._prepare = prepare
        self._requests = requests

    def __call__(self) -> None:
        self._prepare()
        assert threading.active_count() == 1, threading.enumerate()
        keep_all()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        child_ended, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        # The pipes to the tests, by the process id of the program.
        statuses: dict[int, int] = {}
        while True:
            ready = select.select([self._requests, child_ended], [], [])[0]
            if child_ended in ready:
                os.read(child_ended, 4096)
                self._tell_ends(statuses)
            if self._requests in ready:
                message, descriptors, _, _ = socket.recv_fds(self._requests, _MOST_BYTES, 4)
                if not message:
                    return
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    for unused in (child_ended, wake, descriptors[3], *statuses.values()):
                        os.close(unused)
                    self._requests.close()
                    self._run(pickle.loads(message), descriptors[:3])
                for descriptor in descriptors[:3]:
                    os.close(descriptor)
                statuses[pid] = descriptors[3]
                _send_number(descriptors[3], pid)

    @staticmethod
    def _tell_ends(statuses: dict[int, int]) -> None:
        for pid in list(statuses):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                pipe = statuses.pop(pid)
                _send_number(pipe, os.waitstatus_to_exitcode(status))
                os.close(pipe)

    @staticmethod
    def _run(program: Program, streams: Sequence[int]) -> NoReturn:
        status = 1
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            status = program.run(streams)
            sys.stdout.flush()
        finally:
            os._exit(status)


def _send_number(pipe: int, number: int) -> None:
    with suppress(BrokenPipeError):  # The test has ended.
        os.write(pipe, number.to_bytes(_BYTES_OF_NUMBER, "little", signed=True))
