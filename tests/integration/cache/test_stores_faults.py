"""Cache servers that are down, slow, dead or broken: how long callers wait, and who is next."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest

from sharded_orm.cache.stores.base import CacheEntry, CacheServer, ServerDown
from sharded_orm.cache.stores.factory import open_servers
from sharded_orm.conf import CacheOptions
from tests.clock import Clock
from tests.services.proxy import Proxy
from tests.services.server import HOST, PrivateServer, free_port
from tests.services.speaker import Script, Speaker

# As long as a loaded machine may let a call wait that must succeed.
TIMEOUT = 1.0
# Seconds that a loaded machine may add.
MARGIN = 10.0
OPTIONS = CacheOptions(objects="tested", lists="tested", timeout=TIMEOUT, backoff=2.0)
KINDS = ("memcached", "redis")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def own(kind: str, request: pytest.FixtureRequest) -> Iterator[PrivateServer]:
    server = request.getfixturevalue(f"own_{kind}")
    yield server
    if server.pid is None:
        server.start()


@pytest.fixture
def opened(kind: str, settings: Any, clock: Clock) -> Iterator[Callable[..., CacheServer]]:
    """Return a server object for a port."""
    made: list[CacheServer] = []

    def opened(port: int, password: str | None = None) -> CacheServer:
        location = f"{HOST}:{port}"
        options = {}
        if kind == "redis":
            location = f"redis://{location}/0"
            options = {"PASSWORD": password} if password else {}
        backend = {
            "memcached": "django.core.cache.backends.memcached.PyMemcacheCache",
            "redis": "django_redis.cache.RedisCache",
        }[kind]
        settings.CACHES = {"tested": {"BACKEND": backend, "LOCATION": location, "OPTIONS": options}}
        made.extend(open_servers("tested", OPTIONS, clock=clock))
        return made[-1]

    yield opened
    for server in made:
        server.close()


@pytest.fixture
def proxy(own: PrivateServer) -> Iterator[Proxy]:
    with Proxy(HOST, own.port) as proxy:
        yield proxy


@pytest.fixture
def server(opened: Any, own: PrivateServer) -> CacheServer:
    made: CacheServer = opened(own.port, own.password)
    return made


@pytest.fixture
def proxied(opened: Any, own: PrivateServer, proxy: Proxy) -> CacheServer:
    made: CacheServer = opened(proxy.port, own.password)
    return made


@pytest.fixture
def name() -> str:
    return uuid4().hex


def fails(call: Callable[[], object]) -> float:
    """Return the seconds until ServerDown is raised."""
    began = time.monotonic()
    with pytest.raises(ServerDown):
        call()
    return time.monotonic() - began


def put(server: CacheServer, name: str, value: bytes) -> None:
    assert server.fill([CacheEntry(name, value)], 60) == ([True], [])


def value_of(server: CacheServer, name: str) -> bytes | None:
    return server.read([name])[0][0]


# ##### Unreachable servers #####


def test_a_server_that_is_not_there_fails_at_once_and_rests(opened: Any, clock: Clock) -> None:
    server = opened(free_port())
    assert fails(lambda: server.read(["x"])) < MARGIN
    assert not server._breaker.is_closed
    for call in (
        lambda: server.read(["x"], ["y"]),
        lambda: server.fill([CacheEntry("x", b"v")], 60),
        lambda: server.mark([("x", b"+")], b"=", 60),
        lambda: server.finish(["x"], []),
        lambda: server.add([("x", b"=")], 60),
        lambda: server.replace("x", b"=", b"+", 60),
        lambda: server.count({"x": 1}),
        lambda: server.counters(["x"]),
        lambda: server.info(),
    ):
        with pytest.raises(ServerDown, match="resting"):
            call()
    clock.now += 2.0
    with pytest.raises(ServerDown, match="Error"):
        server.read(["x"])
    assert not server._breaker.is_closed


def test_a_stopped_server_costs_one_timeout(
    server: CacheServer, own: PrivateServer, clock: Clock, name: str
) -> None:
    put(server, name, b"value")
    own.pause()
    try:
        assert TIMEOUT * 0.9 < fails(lambda: server.read([name])) < TIMEOUT + MARGIN
        assert fails(lambda: server.read([name])) < TIMEOUT
        clock.now += 2.0
        # One attempt: the kernel accepts a new connection, and nobody answers.
        assert TIMEOUT * 0.9 < fails(lambda: server.read([name])) < TIMEOUT + MARGIN
        assert fails(lambda: server.read([name])) < TIMEOUT
    finally:
        own.resume()
    clock.now += 2.0
    assert value_of(server, name) == b"value"
    assert server._breaker.is_closed
    assert value_of(server, name) == b"value"


def test_a_server_that_was_started_anew_is_found_without_a_failure(
    server: CacheServer, own: PrivateServer, name: str
) -> None:
    put(server, name, b"value")
    own.kill()
    own.start()
    assert value_of(server, name) is None
    own.kill()
    own.start()
    # Redis has lost its scripts, too.
    assert server.mark([(name, b"+1\n")], b"=\n", 60) == [5]
    server.finish([], [(name, b"-1\n")])
    assert value_of(server, name) == b"=\n+1\n-1\n"


def test_a_server_that_died_is_down_until_it_is_back(
    server: CacheServer, own: PrivateServer, clock: Clock, name: str
) -> None:
    put(server, name, b"value")
    own.kill()
    assert fails(lambda: server.read([name])) < MARGIN
    own.start()
    assert not server._breaker.is_closed
    clock.now += 2.0
    put(server, name, b"again")


@pytest.mark.parametrize("how", ["cut", "stall", "drop_answers"])
def test_a_network_that_fails(
    proxied: CacheServer, proxy: Proxy, clock: Clock, name: str, how: str
) -> None:
    put(proxied, name, b"value")
    getattr(proxy, how)()
    assert fails(lambda: proxied.finish([name], [])) < TIMEOUT + MARGIN
    proxy.forward()
    clock.now += 2.0
    assert value_of(proxied, name) in (b"value", None)
    put(proxied, name, b"again")
    assert value_of(proxied, name) == b"again"


def test_an_answer_that_comes_after_the_time_meets_no_other_question(
    proxied: CacheServer, proxy: Proxy, clock: Clock, name: str
) -> None:
    put(proxied, name, b"first")
    put(proxied, name + "2", b"second")
    proxy.stall()
    fails(lambda: proxied.read([name]))
    clock.now += 2.0
    proxy.forward()  # now the first request is answered
    assert value_of(proxied, name + "2") == b"second"


def test_an_interrupted_call_leaves_no_connection_behind(
    proxied: CacheServer, proxy: Proxy, name: str
) -> None:
    """A task's time limit interrupts a call like this: a signal handler raises it."""

    class Interrupted(BaseException):
        pass

    def interrupt(signum: int, frame: object) -> None:
        raise Interrupted

    put(proxied, name, b"first")
    put(proxied, name + "2", b"second")
    proxy.stall()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted):
            proxied.read([name])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    proxy.forward()
    assert proxied._breaker.is_closed
    assert value_of(proxied, name + "2") == b"second"


def test_a_signal_in_the_middle_of_a_call_disturbs_nothing(
    proxied: CacheServer, proxy: Proxy, name: str
) -> None:
    put(proxied, name, b"value")

    def go_on(signum: int, frame: object) -> None:
        proxy.forward()

    proxy.stall()
    before = signal.signal(signal.SIGALRM, go_on)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert value_of(proxied, name) == b"value"
    finally:
        signal.signal(signal.SIGALRM, before)


# ##### Calls whose answer nobody waits for #####


def test_an_answer_is_read_before_the_next_packet(server: CacheServer, name: str) -> None:
    lost: list[str] = []
    server.finish([], [(name, b"-0\n")], lambda: lost.append("without a connection"))
    put(server, name, b"value")
    assert server.mark([(name + "g", b"+1\n")], b"=\n", 60) == [5]
    for number in range(3):
        server.finish([name], [(name + "g", b"-%d\n" % number)], lambda: lost.append("done"))
    assert value_of(server, name) is None
    assert value_of(server, name + "g") == b"=\n+1\n-0\n-1\n-2\n"
    assert lost == []


def test_a_server_that_stops_does_not_hold_the_caller_up(
    server: CacheServer, own: PrivateServer, clock: Clock, name: str
) -> None:
    put(server, name, b"value")
    lost: list[str] = []
    own.pause()
    try:
        began = time.monotonic()
        server.finish([name], [], lambda: lost.append(name))
        assert time.monotonic() - began < TIMEOUT * 0.9
        assert lost == []
        assert fails(lambda: server.read([name])) < TIMEOUT + MARGIN
        assert lost == [name]
    finally:
        own.resume()


@pytest.mark.parametrize("how", ["cut", "stall", "drop_answers"])
def test_what_was_not_confirmed_is_reported_once(
    proxied: CacheServer, proxy: Proxy, clock: Clock, name: str, how: str
) -> None:
    put(proxied, name, b"value")
    lost: list[str] = []
    getattr(proxy, how)()
    try:
        proxied.finish([name], [], lambda: lost.append(name))
        proxied.read([name])
    except ServerDown:
        lost = lost or [name]  # finish() itself has failed
    proxied.close()
    assert lost == [name]


def test_a_server_that_was_started_anew_has_not_confirmed(
    server: CacheServer, own: PrivateServer, name: str
) -> None:
    put(server, name, b"value")
    lost: list[str] = []
    own.pause()
    server.finish([name], [(name, b"-\n")], lambda: lost.append(name))
    own.kill()
    own.start()
    assert value_of(server, name) is None
    assert lost == [name]


def test_closing_the_connections_reports_what_was_not_confirmed(
    server: CacheServer, name: str
) -> None:
    put(server, name, b"value")
    lost: list[str] = []
    server.finish([name], [], lambda: lost.append(name))
    server.close()
    assert lost == [name]


def test_a_forked_child_reports_nothing(server: CacheServer, name: str) -> None:
    """Its parent does."""
    put(server, name, b"value")
    lost: list[str] = []
    server.finish([name], [], lambda: lost.append(name))
    pid = os.fork()
    if pid == 0:
        try:
            found = value_of(server, name)
        finally:
            os._exit(0 if found is None and not lost else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert value_of(server, name) is None
    assert lost == []


# ##### Invalid answers #####


OWNER = b"0aff:0123456789ab"


def bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


def greet(kind: str, connection: socket.socket) -> None:
    """Answer the packets before the first request."""
    if kind == "redis":
        connection.recv(65536)
        connection.sendall(bulk(b"run_id:0aff\r\n") + bulk(b"role:master\r\n") + bulk(OWNER))


def say(kind: str, *parts: bytes) -> Script:
    """Give the same answer to every request."""

    def script(connection: socket.socket) -> None:
        greet(kind, connection)
        while connection.recv(65536):
            for part in parts:
                connection.sendall(part)

    return script


NONSENSE = {
    "HTTP": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "noise": bytes(range(256)) * 100,
    "another protocol": b"\x4a\x00\x00\x00\x0a5.5.5-10.11",
    "an error": b"ERROR\r\n",
    "silence": b"",
    "lines": b"\r\n" * 10,
}


@pytest.mark.parametrize("what", NONSENSE)
@pytest.mark.parametrize("with_end", [False, True])
@pytest.mark.parametrize("greets", [False, True])
def test_nonsense_is_not_believed(
    opened: Any, kind: str, what: str, with_end: bool, greets: bool
) -> None:
    words = NONSENSE[what] + (b"\r\n" if with_end else b"")
    with Speaker(say(kind if greets else "", words)) as speaker:
        server = opened(speaker.port)
        assert fails(lambda: server.read(["guard"], ["object"])) < TIMEOUT + MARGIN
        assert not server._breaker.is_closed
        assert fails(lambda: server.read(["guard"])) < TIMEOUT


ANSWERS = {
    # To a read of one name.
    "memcached": {
        "a value that is shorter than it says": b"VA 9\r\nshort\r\n",
        "a value that is longer than it says": b"VA 2\r\nlonger\r\n",
        "a value without a size": b"VA\r\nvalue\r\n",
        "a value of a size below nothing": b"VA -5\r\nvalue\r\n",
        "an answer too many": b"EN\r\nEN\r\n",
        "an end too many": b"EN\r\n\r\n",
        "the answer to a write": b"HD\r\n",
        "half an answer": b"VA 100\r\nhalf",
    },
    # With the owner of the data, which is asked for at the end.
    "redis": {
        "a value that is shorter than it says": b"*2\r\n$9\r\nshort\r\n" + bulk(OWNER),
        "a value that is longer than it says": b"*2\r\n$2\r\nlonger\r\n" + bulk(OWNER),
        "a value without a size": b"*2\r\n$\r\nvalue\r\n" + bulk(OWNER),
        "an answer too many": (b"*2\r\n$-1\r\n" + bulk(OWNER)) * 2,
        "an end too many": b"*2\r\n$-1\r\n" + bulk(OWNER) + b"\r\n",
        "too many values": b"*3\r\n$-1\r\n$-1\r\n" + bulk(OWNER),
        "too few values": b"*1\r\n" + bulk(OWNER),
        "no values": b"*0\r\n",
        "values of another kind": b"*2\r\n:1\r\n" + bulk(OWNER),
        "values in values": b"*2\r\n*1\r\n*1\r\n$-1\r\n" + bulk(OWNER),
        "values of another incarnation": b"*2\r\n$-1\r\n" + bulk(OWNER[:-1] + b"c"),
        "values of nobody": b"*2\r\n$1\r\nx\r\n$-1\r\n",
        "the answer to a write": b":1\r\n",
        "a refusal": b"-READONLY You can't write against a read only replica.\r\n",
        "half an answer": b"*2\r\n$100\r\nhalf",
    },
}


GREETINGS = {
    "no INFO": b"-NOPERM this user has no permissions to run the 'info' command\r\n" * 2,
    "no run_id": bulk(b"redis_version:7.0.15\r\n") + bulk(b"role:master\r\n"),
    "a replica": bulk(b"run_id:0aff\r\n") + bulk(b"role:slave\r\n"),
    "INFO of another kind": b":1\r\n" * 2,
}
REASONS = {
    "no INFO": "INFO was refused: NOPERM",
    "no run_id": "no run_id",
    "a replica": "it is a replica",
    "INFO of another kind": "unexpected reply to INFO",
}


@pytest.mark.parametrize("kind", ["redis"])
@pytest.mark.parametrize("what", GREETINGS)
def test_a_redis_whose_data_cannot_be_told_from_earlier_ones_is_not_used(
    opened: Any, what: str
) -> None:
    with Speaker(say("", GREETINGS[what] + bulk(OWNER))) as speaker:
        server = opened(speaker.port)
        with pytest.raises(ServerDown, match=REASONS[what]):
            server.read(["x"])
        assert not server._breaker.is_closed


@pytest.mark.parametrize("kind", ["redis"])
def test_a_redis_whose_data_somebody_else_claims_at_once_is_not_used(opened: Any) -> None:
    """Like a proxy that sends each packet to another server."""

    def script(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(bulk(b"run_id:1bff\r\n") + bulk(b"role:master\r\n") + bulk(OWNER))
        connection.recv(65536)
        connection.sendall(bulk(OWNER))

    with Speaker(script) as speaker:
        server = opened(speaker.port)
        with pytest.raises(ServerDown, match="several servers"):
            server.read(["x"])


@pytest.mark.parametrize(
    ("kind", "what"), [(kind, what) for kind in KINDS for what in ANSWERS[kind]]
)
def test_a_wrong_answer_is_not_believed(opened: Any, kind: str, what: str) -> None:
    with Speaker(say(kind, ANSWERS[kind][what])) as speaker:
        server = opened(speaker.port)
        assert fails(lambda: server.read(["x"])) < TIMEOUT + MARGIN
        assert not server._breaker.is_closed


def test_who_trickles_does_not_hold_a_caller(opened: Any, kind: str) -> None:
    def trickle(connection: socket.socket) -> None:
        greet(kind, connection)
        connection.recv(65536)
        # Each byte comes long before a socket would time out.
        while not speaker.over.wait(TIMEOUT / 10):
            connection.sendall(b"x")

    with Speaker(trickle) as speaker:
        server = opened(speaker.port)
        assert fails(lambda: server.read(["x"])) < TIMEOUT + MARGIN


@pytest.mark.parametrize("kind", ["redis"])
def test_the_time_for_the_greeting_is_part_of_the_time_for_a_call(opened: Any, kind: str) -> None:
    timeout = 1.0

    def late(connection: socket.socket) -> None:
        speaker.over.wait(timeout * 0.8)
        greet(kind, connection)
        speaker.over.wait()

    with Speaker(late) as speaker:
        server = opened(speaker.port)
        server.timeout = timeout
        assert timeout * 0.9 < fails(lambda: server.read(["x"])) < timeout * 1.6


def test_who_never_ends_is_stopped(opened: Any, kind: str) -> None:
    def pour(connection: socket.socket) -> None:
        greet(kind, connection)
        while True:
            connection.sendall(b"x" * 65536)

    with Speaker(pour) as speaker:
        server = opened(speaker.port)
        assert fails(lambda: server.read(["x"])) < TIMEOUT + MARGIN


def test_a_value_may_come_in_pieces(opened: Any, kind: str) -> None:
    answer = {
        "memcached": b"VA 12\r\nMN\r\n :1234\r\n\r\n",
        "redis": b"*2\r\n$12\r\nMN\r\n :1234\r\n\r\n" + bulk(OWNER),
    }[kind]

    def in_pieces(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greet(kind, connection)
        connection.recv(65536)
        for position in range(len(answer)):
            connection.sendall(answer[position : position + 1])
        speaker.over.wait()

    with Speaker(in_pieces) as speaker:
        server = opened(speaker.port)
        assert value_of(server, "x") == b"MN\r\n :1234\r\n"
        server.close()


def test_a_kept_connection_that_died_is_replaced_once(opened: Any, kind: str) -> None:
    """A server that closes the connection on each request is down, though it listens."""

    def hang_up(connection: socket.socket) -> None:
        greet(kind, connection)
        connection.recv(65536)

    with Speaker(hang_up) as speaker:
        server = opened(speaker.port)
        fails(lambda: server.read(["x"]))
        assert speaker.connections == 1
