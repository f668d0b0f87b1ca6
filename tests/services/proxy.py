"""A TCP proxy in front of a server: it forwards, cuts, stalls or swallows answers.

It has these modes, each of which is a way in which a network fails for its clients:

============ ==============================================================================
forward      none
cut          connections are reset, new ones refused
stall        connections are accepted and stay open, and nothing comes through: a black hole
drop answers the request arrives; instead of its answer the connection is reset, so that the
             client does not know what the server has done
============ ==============================================================================
"""

from __future__ import annotations

import enum
import queue
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future

from tests.services.server import free_port

_CHUNK = 1 << 16
# SO_LINGER on, 0 seconds: close() sends a reset and drops unsent data.
_RESET = struct.pack("ii", 1, 0)


class Mode(enum.Enum):
    """What happens to connections and their data."""

    FORWARD = "forward"
    CUT = "cut"
    STALL = "stall"
    DROP_ANSWERS = "drop answers"


class Proxy:
    """Listens on a free port for one server. A mode is in effect when the call that sets it
    returns.

    The server need not run: the proxy passes its absence on as a closed connection. Use as a
    context manager, or call :meth:`close`.
    """

    def __init__(self, host: str, port: int) -> None:
        """:param host, port: address of the server."""
        self.target = (host, port)
        #: Number of answers that were swallowed.
        self.dropped = 0
        self.mode = Mode.FORWARD
        self.links: set[_Link] = set()
        self._orders: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]]
        self._orders = queue.SimpleQueue()
        self.selector = selectors.DefaultSelector()
        self._bell, self._button = socket.socketpair()
        self.selector.register(self._bell, selectors.EVENT_READ)
        self._listener: socket.socket | None = None
        self._running = True
        self.host, self.port = "127.0.0.1", free_port()
        self._listen()
        self._thread = threading.Thread(target=self._run, name=f"proxy-{port}", daemon=True)
        self._thread.start()

    # ##### For tests #####

    def forward(self) -> None:
        """Let everything through, beginning with the data that a stall has held back."""
        self._order(lambda: self._turn_to(Mode.FORWARD))

    def cut(self) -> None:
        """Reset all connections and refuse new ones."""
        self._order(lambda: self._turn_to(Mode.CUT))

    def stall(self) -> None:
        """Accept connections and requests; forward nothing, close nothing."""
        self._order(lambda: self._turn_to(Mode.STALL))

    def drop_answers(self) -> None:
        """Forward requests; reset the connection when the answer comes.

        If the server speaks first, the connection is reset then, so that no new connection
        succeeds.
        """
        self._order(lambda: self._turn_to(Mode.DROP_ANSWERS))

    def close(self) -> None:
        """Reset all connections and end. May be called twice."""
        if self._thread.is_alive():
            self._order(self._end)
            self._thread.join()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _order(self, action: Callable[[], None]) -> None:
        done: Future[None] = Future()
        self._orders.put((action, done))
        self._button.send(b"!")
        done.result()

    # ##### In the thread of the proxy #####

    def _run(self) -> None:
        while self._running:
            if self.mode is Mode.STALL:
                # The kernel goes on accepting connections and data, but nobody reads them.
                self._obey()
                continue
            for key, events in self.selector.select():
                if key.fileobj is self._bell:
                    self._obey()
                    break  # the other events may belong to sockets that are closed now
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self.links:  # not closed by an event before this one
                    try:
                        key.data.handle(key.fileobj, events)
                    except OSError:  # reset, refused: of no more use to either side
                        key.data.close()

    def _obey(self) -> None:
        action, done = self._orders.get()
        self._bell.recv(1)  # one byte for each order
        try:
            done.set_result(action())
        except OSError as exc:  # somebody has taken the port
            done.set_exception(exc)

    def _turn_to(self, mode: Mode) -> None:
        self.mode = mode
        if mode is Mode.CUT:
            self._hang_up()
        elif self._listener is None:
            self._listen()

    def _end(self) -> None:
        self._running = False
        self._hang_up()
        self.selector.close()
        self._bell.close()
        self._button.close()

    def _hang_up(self) -> None:
        if self._listener is not None:
            self.selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        for link in list(self.links):
            link.close()

    def _listen(self) -> None:
        self._listener = socket.create_server((self.host, self.port), backlog=1024)
        self._listener.setblocking(False)
        self.selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except OSError:  # it has gone again
            return
        _Link(self, client)


class _Link:
    """A client's connection and the connection to the server that belongs to it."""

    def __init__(self, proxy: Proxy, client: socket.socket) -> None:
        self._proxy = proxy
        self._client, self._server = client, socket.socket()
        self._peer = {self._client: self._server, self._server: self._client}
        #: Data that is still to be sent to each end.
        self._held = {self._client: b"", self._server: b""}
        self._asked = False
        for end in self._peer:
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            proxy.selector.register(end, selectors.EVENT_READ, self)
        proxy.links.add(self)
        # Continues by itself; a refusal makes the socket readable and raises there.
        self._server.connect_ex(proxy.target)

    def handle(self, end: socket.socket, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._send(end, self._held[end])
        if events & selectors.EVENT_READ:
            data = end.recv(_CHUNK)
            if not data:
                self.close(reset=False)
            elif end is self._client:
                self._asked = True
                self._send(self._server, data)
            elif self._proxy.mode is Mode.DROP_ANSWERS:
                self._proxy.dropped += self._asked
                self.close()
            else:
                self._send(self._client, data)

    def _send(self, to: socket.socket, data: bytes) -> None:
        held_before = self._held[to]
        try:
            self._held[to] = data[to.send(data) :]
        except BlockingIOError:  # full, or not connected yet
            self._held[to] = data
        if held_before or self._held[to]:
            self._watch()

    def _watch(self) -> None:
        """Write to an end while data is held for it; its peer has to wait until then."""
        for end, peer in self._peer.items():
            events = selectors.EVENT_WRITE if self._held[end] else 0
            if not self._held[peer]:
                events |= selectors.EVENT_READ
            if end in self._proxy.selector.get_map():
                self._proxy.selector.unregister(end)
            if events:
                self._proxy.selector.register(end, events, self)

    def close(self, reset: bool = True) -> None:
        self._proxy.links.discard(self)
        for end in self._peer:
            if end in self._proxy.selector.get_map():
                self._proxy.selector.unregister(end)
            if reset:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            end.close()
