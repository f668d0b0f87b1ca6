"""Sockets to cache servers: pooled, with a time limit on each call, closed when in doubt."""

from __future__ import annotations

import socket
import ssl
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import TypeVar

from sharded_orm import forks
from sharded_orm.cache.stores.base import MAX_VALUE, CacheServer, ServerDown
from sharded_orm.circuit_breaker import CircuitBreaker

_CHUNK = 1 << 16
#: The number of idle connections that a server keeps.
_MAX_IDLE = 64
_LOST = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)

Answer = TypeVar("Answer")
#: Parses an answer; returns None while it is incomplete, raises :exc:`ProtocolError` if it is
#: malformed.
Parser = Callable[[bytes], Answer | None]
#: Bytes to send, or a function that makes them for a connection.
Packet = bytes | Callable[["Connection"], bytes]


class ProtocolError(Exception):
    """The answer of a server is malformed, or does not belong to the question."""


class Outdated(ConnectionError):
    """The server holds other data than when the connection was opened."""


class Connection:
    """One connection to a server. Used by one thread at a time."""

    __slots__ = ("_socket", "_timeout", "incarnation")

    def __init__(self, connected: socket.socket, timeout: float, incarnation: bytes = b"") -> None:
        """
        :param timeout: seconds for one :meth:`ask`.
        :param incarnation: identifies the data on the server, for functions that make packets.
        """
        self.incarnation = incarnation
        self._socket = connected
        self._timeout = timeout
        connected.settimeout(timeout)

    def ask(self, packet: bytes, end: bytes, parse: Parser[Answer], deadline: float) -> Answer:
        """Send ``packet`` and receive until ``parse`` returns an answer.

        After an error the connection must be closed.

        :param end: the last bytes of every answer.
        :param deadline: on the monotonic clock; at most the timeout of the connection from now.
        :raises OSError: the connection is lost, or the time is over.
        :raises ProtocolError: the answer is malformed, or too long for the packet.
        """
        # The send buffer is empty now, so a short packet fits. Most exchanges need these two
        # calls only, within the timeout of the socket.
        sent = self._socket.send(packet)
        if sent < len(packet):
            self._send(memoryview(packet)[sent:], deadline)
            answer = b""
        else:
            answer = self._socket.recv(_CHUNK)
            if not answer:
                raise ConnectionResetError("closed by the server")
            if answer.endswith(end):
                parsed = parse(answer)
                if parsed is not None:
                    return parsed
        return self._receive(answer, end, parse, deadline, len(packet))

    def _send(self, rest: memoryview, deadline: float) -> None:
        while rest:
            self.limit(deadline)
            rest = rest[self._socket.send(rest) :]

    def _receive(
        self, start: bytes, end: bytes, parse: Parser[Answer], deadline: float, packet_size: int
    ) -> Answer:
        answer = bytearray(start)
        # Each name in the packet has at least 8 bytes, and one value in the answer.
        limit = (packet_size // 8 + 1) * (MAX_VALUE + 1000)
        while True:
            self.limit(deadline)
            chunk = self._socket.recv(_CHUNK)
            if not chunk:
                raise ConnectionResetError("closed by the server")
            answer += chunk
            if answer.endswith(end):
                parsed = parse(bytes(answer))
                if parsed is not None:
                    self.limit()
                    return parsed
            if len(answer) > limit:
                raise ProtocolError("endless answer")

    def limit(self, deadline: float | None = None) -> None:
        """Let the socket wait until ``deadline``; by default for the timeout at each call."""
        if deadline is None:
            self._socket.settimeout(self._timeout)
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(left)

    def close(self) -> None:
        """Close the socket, without a farewell to the server."""
        self._socket.close()


class RemoteServer(CacheServer):
    """A server behind a socket, with its idle connections and a circuit breaker."""

    #: The last bytes of every answer.
    _end: bytes

    def __init__(
        self,
        name: str,
        *,
        timeout: float,
        backoff: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        :param name: for messages, without credentials.
        :param timeout: seconds for a whole call, connecting included, resolving of names excluded.
        :param backoff: seconds without a call after a failure.
        :param clock: of the backoff.
        """
        self.name = name
        self.timeout = timeout
        self._breaker = CircuitBreaker(backoff, clock)
        # Last in, first out: after a peak the others stay idle, and nobody notices if a server or
        # firewall drops them. pop() and append() need no lock.
        self._idle: list[Connection] = []
        self._process = forks.identity()

    @abstractmethod
    def _connect(self, timeout: float) -> Connection:
        """Open a connection that is ready for commands.

        :raises OSError, ProtocolError: that failed.
        """

    def _exchange(self, packet: Packet, parse: Parser[Answer]) -> Answer:
        """Send a packet and return its answer, in one round trip.

        :raises ServerDown: that failed, or the server rests.
        """
        if forks.identity() != self._process:
            self._after_fork()
        is_trial = not self._breaker.is_closed
        if is_trial and not self._breaker.claim(None):
            raise ServerDown(f"resting: {self._breaker.cause()}")
        deadline = time.monotonic() + self.timeout
        try:
            answer = self._ask(packet, parse, deadline)
        except (OSError, ProtocolError) as exc:
            raise self._failed(exc) from exc
        self.round_trips += 1
        if is_trial:
            self._breaker.reset(None)
        return answer

    def _ask(self, packet: Packet, parse: Parser[Answer], deadline: float) -> Answer:
        while True:
            try:
                connection = self._idle.pop()
                is_new = False
            except IndexError:
                left = max(deadline - time.monotonic(), 0.001)
                connection = self._connect(left)
                is_new = True
            try:
                if is_new:
                    connection.limit(deadline)
                question = packet if isinstance(packet, bytes) else packet(connection)
                answer = connection.ask(question, self._end, parse, deadline)
                if is_new:
                    connection.limit()
            except _LOST:
                connection.close()
                if is_new:
                    raise
                # The server was restarted, closes idle connections, or holds other data: that
                # is true of the other idle connections, too.
                self.close()
            except BaseException:
                # The answer may still come, and must not be taken for that to the next question.
                connection.close()
                raise
            else:
                if len(self._idle) < _MAX_IDLE:
                    self._idle.append(connection)
                else:
                    connection.close()
                return answer

    def _failed(self, reason: object) -> ServerDown:
        """Open the circuit breaker. Returns the error to raise."""
        # The exception's text alone may be empty, or a mere address.
        text = f"{type(reason).__name__}: {reason}" if isinstance(reason, Exception) else reason
        text = f"{self.name}: {text}"
        self._breaker.trip(None, ServerDown(text))
        self.close()
        return ServerDown(text)

    def _after_fork(self) -> None:
        # The connections are the parent's. Closing our descriptors does not end them.
        self.close()
        self._breaker.after_fork()
        self._process = forks.identity()

    def close(self) -> None:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return
            connection.close()
