"""A proxy in front of a PostgreSQL server that records what its clients send."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

#: What clients may send: the first byte of a message, and its name.
_NAMES = {
    b"Q": "query", b"P": "parse", b"B": "bind", b"D": "describe", b"E": "execute", b"S": "sync",
    b"C": "close", b"d": "copy data", b"c": "copy done", b"f": "copy fail", b"X": "terminate",
    b"p": "password", b"H": "flush", b"F": "call",
}  # fmt: skip


class PacketRecorder:
    """Listens on a free port for one server, without TLS. Each client has a thread for each direction.

    ``packets`` has an entry for each group of messages that a client sent before it had to wait for
    an answer: the text of a simple query, or the names of the messages of an extended one.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.host, self.port = self._listener.getsockname()[:2]
        self.packets: list[str] = []
        #: Connections that clients have opened so far.
        self.opened = 0
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> PacketRecorder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for opened in (self._listener, *self._sockets):
            with suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)
            opened.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self.opened += 1
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._sockets.append(end)
                for work in (self._record, self._answer):
                    threading.Thread(target=work, args=(client, server), daemon=True).start()

    def _record(self, client: socket.socket, server: socket.socket) -> None:
        buffer, has_begun, group = b"", False, []
        with suppress(OSError):
            while data := client.recv(1 << 16):
                buffer += data
                while len(buffer) >= 8:
                    # Messages before the first password have no first byte.
                    start = 1 if has_begun else 0
                    length = int.from_bytes(buffer[start : start + 4]) + start
                    if len(buffer) < length:
                        break
                    message, buffer = buffer[:length], buffer[length:]
                    if not has_begun:
                        # Only the number of requests for encryption is this high.
                        has_begun = int.from_bytes(message[4:8]) >> 16 == 3
                        continue
                    name = _NAMES[message[:1]]
                    if name == "query":
                        self.packets.append(message[5:-1].decode())
                    elif name not in ("terminate", "password", "flush"):
                        group.append(name)
                        if name in ("sync", "copy done", "copy fail"):
                            self.packets.append(" ".join(group))
                            group = []
                server.sendall(data)
        with suppress(OSError):
            server.shutdown(socket.SHUT_WR)

    def _answer(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 16):
                client.sendall(data)
        with suppress(OSError):
            client.shutdown(socket.SHUT_WR)
