"""Connections to cache servers: all bytes arrive, and no call outlives its deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from sharded_orm.cache.stores.sockets import Connection, OwedAnswer

# No send buffer takes as much at once.
LONG = b"0123456789" * 1_000_000
TIMEOUT = 0.3
# Seconds that a loaded machine may add.
MARGIN = 10.0


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def signals() -> Iterator[list[int]]:
    """Interrupt every system call of the test after some milliseconds, again and again."""
    received: list[int] = []

    def go_on(signum: int, frame: object) -> None:
        received.append(signum)
        assert len(received) < MARGIN / 0.02, "the call waits for ever"

    before = signal.signal(signal.SIGALRM, go_on)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    yield received
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def ask(connection: Connection, packet: bytes, timeout: float = TIMEOUT) -> bytes:
    return connection.ask(packet, b"\n", lambda answer: answer, time.monotonic() + timeout)


@pytest.mark.parametrize("packet", [b"question", LONG])
def test_a_call_ends_by_its_deadline_also_under_signals(
    ends: tuple[socket.socket, socket.socket], signals: list[int], packet: bytes
) -> None:
    connection = Connection(ends[0], TIMEOUT)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        ask(connection, packet)
    assert TIMEOUT * 0.9 < time.monotonic() - began < MARGIN
    assert signals


def test_a_posted_packet_that_nobody_receives_ends_by_its_deadline(
    ends: tuple[socket.socket, socket.socket], signals: list[int]
) -> None:
    connection = Connection(ends[0], TIMEOUT)
    owed = OwedAnswer(b"\n", lambda answer: True, lambda: None, len(LONG))
    with pytest.raises(TimeoutError):
        connection.post(LONG, owed, time.monotonic() + TIMEOUT)
    assert signals


def test_who_receives_slowly_does_not_hold_a_caller(
    ends: tuple[socket.socket, socket.socket], signals: list[int]
) -> None:
    """The deadline is for the whole packet, not for each part that the send buffer takes."""
    ours, theirs = ends
    theirs.setblocking(False)

    def receive(signum: int, frame: object) -> None:
        with contextlib.suppress(BlockingIOError):
            signals.append(len(theirs.recv(1 << 14)))

    signal.signal(signal.SIGALRM, receive)
    connection = Connection(ours, TIMEOUT)
    with pytest.raises(TimeoutError):
        ask(connection, LONG)
    assert sum(signals) < len(LONG) / 2


def test_a_full_send_buffer_is_waited_for(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    connection = Connection(ours, MARGIN)
    ours.setblocking(False)
    filled = 0
    with pytest.raises(BlockingIOError):
        while True:
            filled += ours.send(b"x" * 1000)
    ours.settimeout(MARGIN)
    received = bytearray()

    def serve() -> None:
        while len(received) < filled + len(b"question"):
            received.extend(theirs.recv(1 << 16))
        theirs.sendall(b"answer\n")

    server = threading.Thread(target=serve)
    server.start()
    assert ask(connection, b"question", MARGIN) == b"answer\n"
    server.join()
    assert received[filled:] == b"question"


@pytest.mark.parametrize("is_changing", [False, True])
def test_all_of_a_long_packet_is_sent(
    ends: tuple[socket.socket, socket.socket], is_changing: bool
) -> None:
    """A class of sockets that changes what it sends, as TLS does, sends all bytes itself."""

    class Changing(socket.socket):
        def send(self, data: bytes | memoryview, flags: int = 0) -> int:  # type: ignore[override]
            return super().send(bytes(data).swapcase(), flags)

    theirs = ends[1]
    ours = Changing(fileno=ends[0].detach()) if is_changing else ends[0]
    packet = b"Question" * 500_000
    received = bytearray()

    def serve() -> None:
        while len(received) < len(packet):
            received.extend(theirs.recv(1 << 16))
        theirs.sendall(b"answer\n")

    server = threading.Thread(target=serve)
    server.start()
    with ours:
        assert ask(Connection(ours, MARGIN), packet, MARGIN) == b"answer\n"
    server.join()
    assert received == (packet.swapcase() if is_changing else packet)


class NoSend(socket.socket):
    def send(self, data: object, flags: int = 0) -> int:  # type: ignore[override]
        raise ConnectionRefusedError("send() was called")


@pytest.mark.parametrize("is_replaced", [False, True])
def test_the_send_of_another_class_of_sockets_is_called(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    """Libraries of green threads put a class of their own in place of ``socket.socket``."""
    with NoSend(fileno=ends[0].detach()) as ours:
        if is_replaced:
            monkeypatch.setattr(socket, "socket", NoSend)
        connection = Connection(ours, TIMEOUT)
        with pytest.raises(ConnectionRefusedError):
            ask(connection, b"question")


def test_a_closed_connection_sends_nothing(ends: tuple[socket.socket, socket.socket]) -> None:
    """The number of its file descriptor may belong to another connection already."""
    ours = ends[0]
    connection = Connection(ours, TIMEOUT)
    other, reader = socket.socketpair()
    number = ours.fileno()
    connection.close()
    with other, reader, socket.socket(fileno=os.dup2(other.fileno(), number)):
        with pytest.raises(OSError, match="Bad file descriptor"):
            ask(connection, b"question")
        reader.setblocking(False)
        with pytest.raises(BlockingIOError):
            reader.recv(1)
