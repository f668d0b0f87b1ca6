"""Positions in PostgreSQL's log, and whether a server answers at an address."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from sharded_orm.backends.postgresql import server_probe
from sharded_orm.backends.postgresql.replication import missing


@pytest.mark.parametrize(
    ("wanted", "have", "expected"),
    [
        ("0/3000148", "0/3000148", ""),
        ("0/3000148", "0/3000147", "0/3000148"),
        # Compared as numbers, not as text.
        ("0/A000000", "0/10000000", ""),
        ("10/0", "9/FFFFFFFF", "10/0"),
        ("0/1", "", "0/1"),
        ("", "0/1", ""),
    ],
)
def test_missing(wanted: str, have: str, expected: str) -> None:
    assert missing(wanted, have) == expected


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    monkeypatch.setattr(server_probe, "_PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def settings(listener: socket.socket, host: str = "127.0.0.1") -> dict[str, object]:
    return {"HOST": host, "PORT": listener.getsockname()[1]}


def test_a_server_that_does_not_speak_is_silent(listener: socket.socket) -> None:
    """The kernel takes connections for a process that hangs."""
    assert server_probe.is_silent(settings(listener))


def test_a_port_without_a_server_is_silent(listener: socket.socket) -> None:
    free = settings(listener)
    listener.close()
    assert server_probe.is_silent(free)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1,no.such.host.invalid"])
def test_a_server_that_speaks_is_not_silent(listener: socket.socket, host: str) -> None:
    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(8)
            connection.sendall(b"N")

    thread = threading.Thread(target=answer)
    thread.start()
    assert not server_probe.is_silent(settings(listener, host))
    thread.join()


def test_a_server_at_an_unknown_address_is_not_given_up() -> None:
    assert not server_probe.is_silent({"HOST": "", "PORT": ""})
