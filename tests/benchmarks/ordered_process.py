"""A child process that does what its parent orders: an order in JSON per line, and an answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


class OrderedProcess:
    """The child ``python -m MODULE ARGUMENT…``, which calls :func:`obey`; a context manager.

    :param path: a folder in which the child looks for modules first.
    """

    def __init__(self, module: str, *arguments: str, path: str | None = None) -> None:
        # The folder of the tests comes first with -m, unless -P says otherwise.
        first = [] if path is None else ["-P"]
        paths = os.pathsep.join([path or "", os.getcwd()])
        self._process = subprocess.Popen(
            [sys.executable, *first, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ if path is None else {**os.environ, "PYTHONPATH": paths},
        )

    def ask(self, order: str, *arguments: Any) -> Any:
        """Give an order, and return the answer."""
        self.send(order, *arguments)
        return self.receive()

    def send(self, order: str, *arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([order, *arguments]) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> OrderedProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def obey(orders: object) -> None:
    """Call the methods of ``orders`` that the parent names, until it closes the pipe."""
    for line in sys.stdin:
        order, *arguments = json.loads(line)
        print(json.dumps(getattr(orders, order)(*arguments)), flush=True)
