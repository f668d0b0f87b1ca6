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
#: More idle connections than this are closed.
_MAX_IDLE = 64
_LOST = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)

Answer = TypeVar("Answer")
#: Reads a whole answer; None when it goes on, :exc:`Nonsense` when it is none.
Parser = Callable[[bytes], Answer | None]
#: What to send, or what makes it for the connection that was chosen.
Packet = bytes | Callable[["Connection"], bytes]


class ProtocolError(Exception):
    """A server has said something that it cannot say."""


class Outdated(ConnectionError):
    """The other side holds other data than when the connection was opened."""


class Connection:
    """One connection. Of one thread at a time."""

    __slots__ = ("_socket", "_timeout", "incarnation")

    def __init__(self, connected: socket.socket, timeout: float, incarnation: bytes = b"") -> None:
        """
        :param timeout: seconds for one :meth:`ask`.
        :param incarnation: what the other side holds, for who builds packets.
        """
        self.incarnation = incarnation
        self._socket = connected
        self._timeout = timeout
        connected.settimeout(timeout)

    def ask(self, packet: bytes, end: bytes, parse: Parser[Answer], deadline: float) -> Answer:
        """Send ``packet`` and read until ``parse`` is content.

        :param end: the last bytes of every answer.
        :param deadline: on the monotonic clock; never later than the link's timeout from now.

        :raises OSError: the connection is lost, or the time is over.
        :raises Nonsense: see :data:`Parser`. The link is of no use after either.
        """
        link = self._socket
        # Nothing is on its way at this moment, so a short packet finds an empty buffer. These
        # two calls are all that most exchanges need; their limit is that of the socket.
        sent = link.send(packet)
        if sent < len(packet):
            self._send(memoryview(packet)[sent:], deadline)
            answer = b""
        else:
            answer = link.recv(_CHUNK)
            if not answer:
                raise ConnectionResetError("closed by the server")
            if answer.endswith(end):
                found = parse(answer)
                if found is not None:
                    return found
        return self._receive(answer, end, parse, deadline, len(packet))

    def _send(self, rest: memoryview, deadline: float) -> None:
        while rest:
            self.limit(deadline)
            rest = rest[self._socket.send(rest) :]

    def _receive(
        self, begun: bytes, end: bytes, parse: Parser[Answer], deadline: float, asked: int
    ) -> Answer:
        answer = bytearray(begun)
        # No name is shorter than this, and each may have one value.
        limit = (asked // 8 + 1) * (MAX_VALUE + 1000)
        while True:
            self.limit(deadline)
            chunk = self._socket.recv(_CHUNK)
            if not chunk:
                raise ConnectionResetError("closed by the server")
            answer += chunk
            if answer.endswith(end):
                found = parse(bytes(answer))
                if found is not None:
                    self.limit()
                    return found
            if len(answer) > limit:
                raise ProtocolError("endless answer")

    def limit(self, deadline: float | None = None) -> None:
        """How long the socket waits from now on: until ``deadline``; by default the link's
        timeout, each time."""
        if deadline is None:
            self._socket.settimeout(self._timeout)
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(left)

    def close(self) -> None:
        """Without a word to the server."""
        self._socket.close()


class RemoteServer(CacheServer):
    """A server behind a socket: keeps connections and knows when to leave it alone."""

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
        :param timeout: seconds for a whole call, connecting included (not the resolver).
        :param backoff: seconds of rest after a failure.
        :param clock: of the rest.
        """
        self.name = name
        self.timeout = timeout
        self._breaker = CircuitBreaker(backoff, clock)
        # Last in, first out: when load has gone the rest of them idles, and a server or a
        # firewall that drops them disturbs nobody. pop() and append() need no lock.
        self._idle: list[Connection] = []
        self._process = forks.identity()

    @abstractmethod
    def _connect(self, timeout: float) -> Connection:
        """A new connection, ready for commands; OSError or Nonsense if that fails."""

    def _exchange(self, packet: Packet, parse: Parser[Answer]) -> Answer:
        """One round trip.

        :raises ServerDown: it failed, or the server rests.
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
                link = self._idle.pop()
                is_new = False
            except IndexError:
                left = max(deadline - time.monotonic(), 0.001)
                link = self._connect(left)
                is_new = True
            try:
                if is_new:
                    link.limit(deadline)
                question = packet if isinstance(packet, bytes) else packet(link)
                answer = link.ask(question, self._end, parse, deadline)
                if is_new:
                    link.limit()
            except _LOST:
                link.close()
                if is_new:
                    raise
                # The server was started anew, or closes what idles, or holds other data: so it
                # is with the other connections, too.
                self.close()
            except BaseException:
                # Whatever the reason, the answer may still come, and must not meet the next
                # question.
                link.close()
                raise
            else:
                if len(self._idle) < _MAX_IDLE:
                    self._idle.append(link)
                else:
                    link.close()
                return answer

    def _failed(self, reason: object) -> ServerDown:
        """Let the server rest."""
        # Not the exception's text alone: it may be empty, or an address without its meaning.
        text = f"{type(reason).__name__}: {reason}" if isinstance(reason, Exception) else reason
        text = f"{self.name}: {text}"
        self._breaker.trip(None, ServerDown(text))
        self.close()
        return ServerDown(text)

    def _after_fork(self) -> None:
        # The connections are the parent's. Closing our descriptors of them tells nobody.
        self.close()
        self._breaker.after_fork()
        self._process = forks.identity()

    def close(self) -> None:
        while True:
            try:
                link = self._idle.pop()
            except IndexError:
                return
            link.close()
