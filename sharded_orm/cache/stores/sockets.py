"""Sockets to cache servers: pooled, with a time limit for each call.

After an error a socket is closed, so that a late answer is not taken for the next call's answer.

A packet can be *posted*: sent without waiting for its answer. The answer is then *owed*, and is
read when the connection is used the next time.
"""

from __future__ import annotations

import socket
import ssl
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from sharded_orm import forks
from sharded_orm.cache.stores.base import MAX_VALUE, CacheServer, ServerDown
from sharded_orm.circuit_breaker import CircuitBreaker

_CHUNK = 1 << 16
#: The largest number of idle connections that a process keeps to one server.
_MAX_IDLE = 64
#: The largest size in bytes of a packet whose answer need not be read at once. The answer to such a
#: packet fits into the network buffers, so the server can send it although nobody reads it yet.
_MAX_POSTED = 16_000
_LOST = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)

Answer = TypeVar("Answer")
#: A function that parses the bytes of an answer. It returns None while the answer is incomplete,
#: and raises :exc:`ProtocolError` if the answer is malformed.
Parser = Callable[[bytes], Answer | None]
#: The bytes to send, or a function that makes them for the connection that will send them.
Packet = bytes | Callable[["Connection"], bytes]


class ProtocolError(Exception):
    """The answer of a cache server is malformed, or does not fit the commands that were sent."""


class Outdated(ConnectionError):
    """Since the connection was opened, the server has lost its data, or was restarted with older
    data.

    The connection is then closed, and the packet is sent again on a new one.
    """


class Unchanged:
    """The type of :data:`UNCHANGED`."""


#: A parser returns this if the answer is, byte for byte, the one that the caller expects. The
#: answer then need not be parsed.
UNCHANGED = Unchanged()


class OwedAnswer(NamedTuple):
    """The answer to a posted packet (sent without waiting), which nobody has read yet.

    :param end: the bytes with which the answer ends.
    :param is_confirmed: parses the answer, and returns whether the server has executed the commands
        of the packet; None while the answer is incomplete.
    :param lost: the function to call if the server has not confirmed that it has executed the
        commands.
    :param packet_size: the size of the packet in bytes.
    """

    end: bytes
    is_confirmed: Parser[bool]
    lost: Callable[[], object]
    packet_size: int


class Connection:
    """One connection to a cache server. Used by one thread at a time."""

    __slots__ = ("_owed", "_socket", "_timeout", "incarnation")

    def __init__(self, connected: socket.socket, timeout: float, incarnation: bytes = b"") -> None:
        """:param connected: a socket that is connected to the server.
        :param timeout: the time limit in seconds for one :meth:`ask`.
        :param incarnation: a value that identifies the data on the server, for functions that make
            packets (see :data:`Packet`). It changes when the server loses its data, or is restarted
            with older data. Empty (the default) if the server has no such value.
        """
        self.incarnation = incarnation
        self._socket = connected
        self._timeout = timeout
        self._owed: OwedAnswer | None = None
        connected.settimeout(timeout)

    def ask(self, packet: bytes, end: bytes, parse: Parser[Answer], deadline: float) -> Answer:
        """Send ``packet``, receive until ``parse`` returns an answer, and return this answer.

        After an error the caller must close the connection.

        :param end: the bytes with which every answer ends. ``parse`` is called only if the received
            bytes end with them.
        :param deadline: the time on the monotonic clock by which the answer must have arrived. It
            must not be later than now plus the connection's timeout.
        :raises OSError: the connection is lost, or the deadline has passed.
        :raises ProtocolError: the answer is malformed, or longer than any answer to the packet.
        """
        if self._owed is not None:
            self._settle(deadline)
        # First try one send() and one recv(), which are enough for most exchanges. Do not set the
        # timeout of the socket before: it is that of the connection already. Usually, only recv()
        # waits, because a short packet fits into the send buffer, which is empty now.
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

    def post(self, packet: bytes, owed: OwedAnswer, deadline: float) -> None:
        """Send ``packet``, and leave its answer for the next use of the connection.

        After an error the caller must close the connection.

        :raises OSError, ProtocolError: as in :meth:`ask`. ``owed.lost`` is not called then.
        """
        if self._owed is not None:
            self._settle(deadline)
        # Call send() with the timeout that the socket has already, as in ask(). Usually this single
        # call is enough.
        sent = self._socket.send(packet)
        if sent < len(packet):
            self._send(memoryview(packet)[sent:], deadline)
            self.limit()
        self._owed = owed

    def _settle(self, deadline: float) -> None:
        """Read the owed answer, so that the connection can be used for the next packet.

        If the answer does not arrive, or does not confirm that the server has executed the
        commands, call the function ``lost`` that was given to :meth:`post` with the packet. Usually
        the answer has arrived already, and this method does not wait.
        """
        owed, self._owed = self._owed, None
        assert owed is not None
        is_confirmed: bool = False
        try:
            is_confirmed = self._receive(
                b"", owed.end, owed.is_confirmed, deadline, owed.packet_size
            )
        finally:
            if not is_confirmed:
                owed.lost()

    def _send(self, rest: memoryview, deadline: float) -> None:
        while rest:
            self.limit(deadline)
            rest = rest[self._socket.send(rest) :]

    def _receive(
        self, start: bytes, end: bytes, parse: Parser[Answer], deadline: float, packet_size: int
    ) -> Answer:
        answer = bytearray(start)
        # No valid answer is larger than this: the answer has at most one value for each name in the
        # packet that was sent, and each name takes at least 8 bytes of the packet.
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
        """Set the timeout of the socket.

        :param deadline: the time on the monotonic clock by which the next send or receive must end.
            None (the default): each send or receive may take the connection's timeout.
        :raises TimeoutError: ``deadline`` has passed.
        """
        if deadline is None:
            self._socket.settimeout(self._timeout)
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(left)

    def close(self) -> None:
        """Close the socket without sending anything to the server.

        If an answer is still owed, its function ``lost`` is called.
        """
        owed, self._owed = self._owed, None
        self._socket.close()
        if owed is not None:
            owed.lost()

    def abandon(self) -> None:
        """Close this process's copy of a socket that belongs to the parent process.

        If the answer to a posted packet was not read yet, the parent process reads it.
        """
        self._owed = None
        self._socket.close()


class RemoteServer(CacheServer):
    """A cache server that is reached through sockets.

    The object keeps idle connections for later calls. It has a circuit breaker: after a failure the
    server is not called for some seconds.
    """

    #: The bytes with which every answer of the server ends.
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
        :param name: the name of the server in messages, without credentials.
        :param timeout: the time limit in seconds for one round trip. It includes connecting, but
            not resolving the host name.
        :param backoff: seconds after a failure in which the server is not called.
        :param clock: returns monotonic time in seconds, with which the backoff is measured.
        """
        self.name = name
        self.timeout = timeout
        self._breaker = CircuitBreaker(backoff, clock)
        # The idle connections. The connection that became idle last is used first. So after a peak
        # of load, connections at the beginning of the list are no longer used. It does no harm if a
        # server or firewall drops these. pop() and append() are atomic, so the list needs no lock.
        self._idle: list[Connection] = []
        self._process = forks.identity()

    @abstractmethod
    def _connect(self, timeout: float) -> Connection:
        """Return a new connection that is ready for commands.

        :param timeout: the time limit in seconds.
        :raises OSError, ProtocolError: the connection could not be opened.
        """

    def _exchange(
        self, packet: Packet, parse: Parser[Answer], *, end: bytes | None = None
    ) -> Answer:
        """Send a packet and return the parsed answer, in one round trip.

        :param end: the bytes with which a complete answer to this packet ends; None for the bytes
            with which the answers of this kind of server usually end.
        :raises ServerDown: there was no valid answer in time, or the server is not called because
            of an earlier failure.
        """
        if forks.identity() != self._process:
            self._after_fork()
        is_trial = not self._breaker.is_closed
        if is_trial and not self._breaker.claim(None):
            raise ServerDown(f"resting: {self._breaker.cause()}")
        deadline = time.monotonic() + self.timeout
        try:
            answer = self._ask(packet, parse, end or self._end, deadline)
        except (OSError, ProtocolError) as exc:
            raise self._failed(exc) from exc
        self.round_trips += 1
        if is_trial:
            self._breaker.reset(None)
        return answer

    def _ask(self, packet: Packet, parse: Parser[Answer], end: bytes, deadline: float) -> Answer:
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
                answer = connection.ask(question, end, parse, deadline)
                if is_new:
                    connection.limit()
            except _LOST:
                connection.close()
                if is_new:
                    raise
                # An idle connection failed. The server was restarted, perhaps with older data, or
                # closes idle connections. So the other idle connections are useless, too. Close
                # them and send the packet again.
                self.close()
            except BaseException:
                # Close the connection: the answer may still arrive, and must not be taken for the
                # answer to the next packet.
                connection.close()
                raise
            else:
                if len(self._idle) < _MAX_IDLE:
                    self._idle.append(connection)
                else:
                    connection.close()
                return answer

    def _post(self, packet: Packet, is_confirmed: Parser[bool], lost: Callable[[], object]) -> bool:
        """Send a packet without waiting for the answer. The next use of the connection reads the
        answer.

        Return False if this failed, or if there is no idle connection. The caller must then send
        the packet with :meth:`_exchange`, although the server may have received a part of it
        already.

        :param is_confirmed: parses the answer, and returns whether the server has executed the
            commands of the packet.
        :param lost: is called if the server has not confirmed that it has executed the commands.
        """
        if forks.identity() != self._process or not self._breaker.is_closed:
            return False
        try:
            connection = self._idle.pop()
        except IndexError:
            return False
        try:
            question = packet if isinstance(packet, bytes) else packet(connection)
            if is_posted := len(question) <= _MAX_POSTED:
                owed = OwedAnswer(self._end, is_confirmed, lost, len(question))
                connection.post(question, owed, time.monotonic() + self.timeout)
        except (OSError, ProtocolError):
            # Return False instead of raising: the caller then sends the packet again by
            # _exchange(), which raises the errors.
            connection.close()
            return False
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return is_posted

    def _failed(self, reason: object) -> ServerDown:
        """Open the circuit breaker, so that the server is not called for a while.

        Returns the error that the caller must raise.

        :param reason: an exception, or a text for the message.
        """
        # The message starts with the type of an exception, because the exception's text may be
        # empty or just an address.
        text = f"{type(reason).__name__}: {reason}" if isinstance(reason, Exception) else reason
        text = f"{self.name}: {text}"
        self._breaker.trip(None, ServerDown(text))
        self.close()
        return ServerDown(text)

    def _after_fork(self) -> None:
        # The idle connections belong to the parent process. The child closes only its copies of
        # the file descriptors, so the parent can go on using them.
        while self._idle:
            self._idle.pop().abandon()
        self._breaker.after_fork()
        self._process = forks.identity()

    def close(self) -> None:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return
            connection.close()
