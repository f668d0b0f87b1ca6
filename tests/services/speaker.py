"""A TCP server that answers with a script of the test, whatever it receives."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

#: Is called with each connection, which is closed when it returns.
Script = Callable[[socket.socket], None]


class Speaker:
    """Listens on a free port; each connection has a thread that runs the script.

    Use as a context manager.
    """

    def __init__(self, script: Script) -> None:
        self.connections = 0
        #: Set when the test is done: a script that only waits can wait for it.
        self.over = threading.Event()
        self._script = script
        self._threads: list[threading.Thread] = []
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host, self.port = self._listener.getsockname()[:2]

    def __enter__(self) -> Speaker:
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.over.set()
        # Ends accept(), unlike close().
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        for connection in self._open:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # closed already
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            thread = threading.Thread(target=self._play, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _play(self, connection: socket.socket) -> None:
        with connection:
            try:
                self._script(connection)
            except OSError:
                pass  # the client has gone
