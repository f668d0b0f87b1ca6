"""Each mode of the tests' proxy does to connections what it promises."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.patience import PATIENCE
from tests.services.proxy import Proxy


class Echo:
    """A server that echoes its input and records it."""

    def __init__(self) -> None:
        self.heard = b""
        self.changed = threading.Condition()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                with self.changed:
                    self.heard += data
                    self.changed.notify_all()
                connection.sendall(data)

    def wait_for(self, text: bytes) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: text in self.heard, PATIENCE)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # close() alone does not wake the thread
        self._listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy("127.0.0.1", echo.port) as proxy:
        yield proxy


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection((proxy.host, proxy.port), timeout=PATIENCE)


def read(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := client.recv(size - len(data))):
        data += more
    return data


def ask(client: socket.socket, text: bytes) -> bytes:
    client.sendall(text)
    return read(client, len(text))


def is_silent(client: socket.socket) -> bool:
    """Whether there is nothing to read *now*: neither data nor an end."""
    return not select.select([client], [], [], 0)[0]


def test_it_forwards(proxy: Proxy) -> None:
    with connect(proxy) as one, connect(proxy) as two:
        assert ask(one, b"one") == b"one"
        assert ask(two, b"two") == b"two"
        assert ask(one, b"three") == b"three"


def test_more_than_a_socket_holds(proxy: Proxy) -> None:
    text = bytes(range(256)) * 40_000
    with connect(proxy) as client:
        # Nothing is read until all is sent, so that every buffer on the way fills up.
        sender = threading.Thread(target=client.sendall, args=(text,))
        sender.start()
        assert read(client, len(text)) == text
        sender.join(PATIENCE)


def test_what_ends_on_one_side_ends_on_the_other(proxy: Proxy, echo: Echo) -> None:
    with connect(proxy) as client:
        client.sendall(b"the last words")
        client.shutdown(socket.SHUT_WR)
        echo.wait_for(b"the last words")
        # An orderly end, not a reset.
        with contextlib.suppress(ConnectionResetError):
            while client.recv(100):
                pass


def test_cut(proxy: Proxy) -> None:
    with connect(proxy) as client:
        assert ask(client, b"x") == b"x"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
    proxy.cut()
    proxy.forward()
    with connect(proxy) as client:
        assert ask(client, b"y") == b"y"


def test_stall(proxy: Proxy, echo: Echo) -> None:
    with connect(proxy) as old:
        assert ask(old, b"before") == b"before"
        proxy.stall()
        old.sendall(b"during")
        with connect(proxy) as new:
            new.sendall(b"another")
            # Any order takes the proxy through its loop, where it would forward.
            proxy.stall()
            assert echo.heard == b"before"
            assert is_silent(old) and is_silent(new)
            proxy.forward()
            assert read(old, 6) == b"during"
            assert read(new, 7) == b"another"


def test_a_stall_may_end_in_a_cut(proxy: Proxy) -> None:
    with connect(proxy) as client:
        assert ask(client, b"x") == b"x"
        proxy.stall()
        client.sendall(b"lost")
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            client.recv(1)


def test_drop_answers(proxy: Proxy, echo: Echo) -> None:
    with connect(proxy) as client:
        assert ask(client, b"before") == b"before"
        proxy.drop_answers()
        client.sendall(b"count me")
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        echo.wait_for(b"count me")
    assert proxy.dropped == 1
    proxy.forward()
    with connect(proxy) as client:
        assert ask(client, b"after") == b"after"


def test_a_server_that_is_not_there(proxy: Proxy, echo: Echo) -> None:
    echo.close()
    # The reset may come as early as in connect().
    with contextlib.suppress(ConnectionResetError), connect(proxy) as client:
        assert client.recv(1) == b""


def test_close(proxy: Proxy) -> None:
    with connect(proxy) as client:
        assert ask(client, b"x") == b"x"
        proxy.close()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    proxy.close()
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)


def test_a_stalled_proxy_can_be_closed(proxy: Proxy) -> None:
    proxy.stall()
    proxy.close()
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
