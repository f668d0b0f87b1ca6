"""A Redis server (4.0 or newer), used through the connections of django-redis or Django.

The client libraries open the connections (TLS, sockets, Sentinel). This module itself sends
commands and receives replies: the pools and parsers of the libraries take more time than the server
does, and cannot limit the time of a whole call.

A *lease* is the permission to store a missing object. It is a random token, which the server keeps
for some seconds as a placeholder under the object's name. A script stores the value only if the
placeholder is still there.

A server may come back with older data: after a restart from its dump, after a failover to a
replica, or after it was a replica itself. Its guards (entries that say whether other entries are
valid) then know nothing of later writes. So the names of all entries begin with the *incarnation*
of the data, a random word. The server stores this word together with the ``run_id`` of the server
that wrote the data. If a new connection finds no word or another ``run_id``, it stores a new word,
so that older entries are no longer found. Each packet also reads the word; if it has changed, the
packet is sent again on a new connection. Callers of :class:`RedisServer` use names without the
word.
"""

from __future__ import annotations

import math
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from redis import ConnectionPool
from redis.exceptions import RedisError

from sharded_orm.cache.stores.base import (
    LEASE_SECONDS,
    MAX_VALUE,
    CacheEntry,
    FoundEntry,
    Lease,
    Reply,
    ServerDown,
)
from sharded_orm.cache.stores.redis.login import LENGTH, OWNER, log_in
from sharded_orm.cache.stores.redis.pools import cause_of, place_of
from sharded_orm.cache.stores.redis.protocol import (
    LINE_END,
    Refusal,
    by_digest,
    by_source,
    pack,
    parse_replies,
)
from sharded_orm.cache.stores.redis.read_packets import is_answer, read_packet
from sharded_orm.cache.stores.redis.scripts import (
    APPEND,
    COMPARE_AND_DELETE,
    COMPARE_AND_SET,
)
from sharded_orm.cache.stores.redis.write_packets import (
    are_numbers,
    finish_packet,
    mark_packet,
    marked_sizes,
    script_packet,
)
from sharded_orm.cache.stores.sockets import (
    UNCHANGED,
    Connection,
    Outdated,
    ProtocolError,
    RemoteServer,
    Unchanged,
)

_PLACEHOLDER = b"\0lease:"
_READ_OWNER = (b"GET", OWNER)
_NUMBERS = frozenset({int})


class RedisServer(RemoteServer):
    """One Redis server. Thread-safe.

    The server must not be a node of a Redis Cluster or a replica, and no proxy may spread one
    connection over several servers. The Redis user must be allowed to run scripts and INFO, and to
    use any entry name. The reply to INFO must contain a ``run_id``, also on a managed server.

    After a failover or a start from a dump, earlier entries are not found any more. A network
    partition may leave two primaries. Clients that still reach the old one may then read entries
    that are no longer valid.
    """

    _end = LINE_END

    def __init__(
        self,
        pool: ConnectionPool,
        *,
        timeout: float,
        backoff: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        :param pool: a pool of redis-py. Only its connection options are used, not its connections.
        :param timeout, backoff, clock: see :class:`RemoteServer`.
        """
        super().__init__(
            f"redis {place_of(pool)}/{pool.connection_kwargs.get('db') or 0}",
            timeout=timeout,
            backoff=backoff,
            clock=clock,
        )
        self._pool = pool

    # ##### Connections #####

    def _connect(self, timeout: float) -> Connection:
        # Raise the error here and not in _open(). Error reports show the local variables of each
        # function on the stack, and the variables of _open() include the password.
        opened = self._open(timeout)
        if isinstance(opened, str):
            raise OSError(f"connecting to {place_of(self._pool)}: {opened}")
        return opened

    def _open(self, timeout: float) -> Connection | str:
        """Return a new connection that is logged in; or a text that says why there is none."""
        options = {
            option: value
            for option, value in self._pool.connection_kwargs.items()
            # Options about maintenance notifications are left out: such notifications need version
            # 3 of the protocol, and this module uses version 2.
            if not option.startswith("maint_notifications")
        }
        limit = options.get("socket_connect_timeout")
        deadline = time.monotonic() + timeout
        owners: list[bytes] = []
        own: dict[str, Any] = {
            "socket_connect_timeout": min(timeout, limit or timeout),
            "socket_timeout": timeout,
            "retry": None,
            "retry_on_timeout": False,
            "retry_on_error": [],
            # redis-py calls this function instead of its own greeting (login), which has no time
            # limit, and may choose version 3 of the protocol.
            "redis_connect_func": lambda connection: owners.append(log_in(connection, deadline)),
        }
        connection = self._pool.connection_class(**{**options, **own})
        try:
            connection.connect()
        except (RedisError, OSError, ProtocolError) as exc:
            connection.disconnect()
            return str(exc) if isinstance(exc, ProtocolError) else cause_of(exc)
        # Take the socket out of redis-py's connection object, because this module sends and
        # receives itself. The attribute _sock is private, but all releases of redis-py have it.
        opened: socket.socket = connection._sock
        connection._sock = None
        return Connection(opened, self.timeout, owners[0])

    # ##### Commands #####

    def _run(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send ``commands`` in one packet and return their replies.

        The last of ``commands`` must read :data:`OWNER`, the entry that says which server wrote the
        data. If its value has changed since the connection was opened, the server has lost its data
        or has older data. The packet is then sent again on a new connection.

        :returns: the replies to the other commands.
        :raises ServerDown: there was no valid reply in time, or the server is not called because of
            an earlier failure.
        """
        owner = b""

        def packet(connection: Connection) -> bytes:
            nonlocal owner
            owner = connection.incarnation
            return pack(commands, f"{owner[-LENGTH:].decode()}:")

        return self._exchange(packet, lambda answer: _replies(answer, len(commands), owner))

    def _pipeline(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send ``commands`` and return their replies.

        Costs one round trip, and a second one if the server does not know a script yet: such a
        script is sent again, so it runs after all other commands. The other commands run in the
        given order. Commands of other clients may run in between.

        :param commands: each command is a tuple of parts. A part that is a str is the name of an
            entry: the incarnation (a random word) is put before it. Bytes are sent as they are.
        """
        if not commands:
            return []
        replies = self._run([*map(by_digest, commands), _READ_OWNER])
        unknown = [
            index
            for index, reply in enumerate(replies)
            if isinstance(reply, Refusal) and reply.code == "NOSCRIPT"
        ]
        if unknown:
            sources = [by_source(commands[index]) for index in unknown]
            again = self._run([*sources, _READ_OWNER])
            for index, reply in zip(unknown, again, strict=True):
                replies[index] = reply
        return replies

    def _checked(self, reply: Any, kind: type) -> Any:
        if isinstance(reply, kind):
            return reply
        if isinstance(reply, Refusal):
            text = f"refused: {reply.code}"
            if reply.code in ("OOM", "WRONGTYPE"):
                # Only this command has failed. So do not call _failed(), after which the server
                # would not be used for some seconds.
                raise ServerDown(f"{self.name} {text}")
            raise self._failed(text)
        raise self._failed("unexpected reply")

    def _get(
        self, names: Sequence[str], expected: tuple[bytes, ...] = ()
    ) -> list[bytes | None] | Unchanged:
        """Return the values of entries, in one round trip.

        :param expected: if given, the values that the caller expects, one for each name. If the
            reply has exactly these values, return :data:`UNCHANGED` without parsing the reply.
        """
        owner = b""

        def packet(connection: Connection) -> bytes:
            nonlocal owner
            owner = connection.incarnation
            return read_packet(names, owner)

        def parse(answer: bytes) -> list[bytes | None] | Unchanged | None:
            if expected and is_answer(answer, expected, owner):
                return UNCHANGED
            replies = parse_replies(answer, 1)
            if replies is None:
                return None
            (values,) = replies
            if isinstance(values, Refusal):
                raise ProtocolError(f"refused: {values.code}")
            if not isinstance(values, list) or len(values) != len(names) + 1:
                raise ProtocolError("unexpected reply to MGET")
            if values.pop() != owner:
                raise Outdated("the data are of another incarnation")
            return [value or None for value in values]

        values: Any = self._exchange(packet, parse)
        return values  # type: ignore[no-any-return]  # parse() makes it

    # ##### The methods of CacheServer #####

    def read(
        self, names: Sequence[str], objects: Sequence[str] = (), again: Sequence[str] = ()
    ) -> Reply:
        if not (names or objects or again):
            return [], [], []
        return self._reply(self._get([*names, *objects, *again]), names, objects)

    def read_again(
        self, names: Sequence[str], name: str, values: tuple[bytes, ...], value: bytes
    ) -> Reply | None:
        found = self._get((*names, name), (*values, value))
        return None if found is UNCHANGED else self._reply(found, names, (name,))

    def _reply(self, values: Any, names: Sequence[str], objects: Sequence[str]) -> Reply:
        middle, last = len(names), len(names) + len(objects)
        return (
            values[:middle],
            [
                # tuple.__new__() makes a FoundEntry in half the time of its constructor. The second
                # item, a lease (permission to store), is always None here. If the value is the
                # placeholder of another reader's lease, the entry counts as missing.
                tuple.__new__(
                    FoundEntry, (None if value and value.startswith(_PLACEHOLDER) else value, None)
                )
                for value in values[middle:last]
            ],
            values[last:],
        )

    def lease(self, objects: Sequence[str], entries: Sequence[FoundEntry]) -> list[Lease | None]:
        token = _PLACEHOLDER + secrets.token_hex(8).encode()
        seconds = b"%d" % LEASE_SECONDS
        commands: list[tuple[Any, ...]] = []
        for name, (value, _) in zip(objects, entries, strict=True):
            if value is None:
                # The object is missing, or the entry has the placeholder of another reader's lease.
                # With the option NX, this SET does not replace such a placeholder.
                commands.append((b"SET", name, token, b"NX", b"EX", seconds))
            else:
                commands.append((COMPARE_AND_SET, name, value, token, seconds))
        return [token if reply in (b"OK", 1) else None for reply in self._pipeline(commands)]

    def release(self, objects: Mapping[str, FoundEntry]) -> None:
        commands = [
            (COMPARE_AND_DELETE, name, lease)
            for name, (_, lease) in objects.items()
            if lease is not None
        ]
        # Delete the placeholders of the leases. If the packet is lost, they soon end by themselves.
        if commands and not self._post_packet(
            lambda owner: script_packet(commands, owner), len(commands), lambda: None
        ):
            for reply in self._pipeline(commands):
                self._checked(reply, int)

    def fill(
        self, entries: Sequence[CacheEntry], ttl: float, again: Sequence[str] = ()
    ) -> tuple[list[bool], list[bytes | None]]:
        seconds = _seconds(ttl)
        commands: list[tuple[Any, ...]] = []
        stored = []
        for name, value, lease in entries:
            fits = 0 < len(value) <= MAX_VALUE
            stored.append(fits)
            if not fits:
                continue
            if lease is None:
                commands.append((b"SET", name, value, b"EX", seconds))
            else:
                commands.append((COMPARE_AND_SET, name, lease, value, seconds))
        count = len(commands)
        guards = list(again)
        commands += [(b"EXPIRE", guard, _seconds(2 * ttl)) for guard in guards]
        if guards:
            commands.append((b"MGET", *guards))
        replies = self._pipeline(commands)
        outcomes = iter(replies[:count])
        return (
            [fits and next(outcomes) in (b"OK", 1) for fits in stored],
            [value or None for value in self._checked(replies[-1], list)] if guards else [],
        )

    def mark(self, records: Sequence[tuple[str, bytes]], header: bytes, ttl: float) -> list[int]:
        if not records:
            return []
        seconds, count = _seconds(ttl), len(records)
        owner = b""
        usual: list[int] | None = None

        def packet(connection: Connection) -> bytes:
            nonlocal owner
            owner = connection.incarnation
            return mark_packet(records, header, seconds, owner)

        def parse(answer: bytes) -> list[Any] | None:
            nonlocal usual
            usual = marked_sizes(answer, count, owner)
            return [] if usual is not None else _replies(answer, 3 * count + 1, owner)

        replies = self._exchange(packet, parse)
        if usual is not None:
            return usual
        sizes = []
        for created, size, prolonged in zip(
            replies[::3], replies[1::3], replies[2::3], strict=True
        ):
            # The reply to SET … NX, which creates a missing guard, is None if the guard existed
            # already.
            if created is not None:
                self._checked(created, bytes)
            self._checked(prolonged, int)
            # If the guard vanished between SET and APPEND, APPEND has created an entry without the
            # guard's first line. Such an entry is not a valid guard, and readers will replace it.
            sizes.append(self._checked(size, int))
        return sizes

    def finish(
        self,
        objects: Sequence[str],
        records: Sequence[tuple[str, bytes]],
        lost: Callable[[], object] | None = None,
    ) -> None:
        count = bool(objects) + len(records)
        if (
            lost is not None
            and count
            and self._post_packet(partial(finish_packet, objects, records), count, lost)
        ):
            return
        commands: list[tuple[Any, ...]] = [(b"UNLINK", *objects)] if objects else []
        commands += [(APPEND, name, record) for name, record in records]
        for reply in self._pipeline(commands):
            self._checked(reply, int)

    def _post_packet(
        self, make: Callable[[bytes], bytes], count: int, lost: Callable[[], object]
    ) -> bool:
        """Send a packet whose replies are numbers, without waiting for the replies.

        Return False if this failed. The caller then sends the commands with :meth:`_pipeline`.

        :param make: returns the packet, whose last command reads the entry :data:`OWNER`. Its
            argument is the value of this entry when the connection was opened.
        :param count: the number of commands in the packet before the last one.
        :param lost: is called if a command was refused, or if the server has lost its data or has
            older data.
        """
        owner = b""

        def packet(connection: Connection) -> bytes:
            nonlocal owner
            owner = connection.incarnation
            return make(owner)

        def is_confirmed(answer: bytes) -> bool | None:
            if are_numbers(answer, count, owner):
                return True
            replies = parse_replies(answer, count + 1)
            if replies is None:
                return None
            if replies.pop() != owner:
                # Raise an error, which closes the connection. Otherwise, later commands on the
                # connection would put the old incarnation before the names of entries.
                raise Outdated("the data are of another incarnation")
            return _NUMBERS.issuperset(map(type, replies))

        return self._post(packet, is_confirmed, lost)

    def add(self, guards: Sequence[tuple[str, bytes]], ttl: float) -> list[bytes]:
        if not guards:
            return []
        keys = [name for name, _ in guards]
        seconds = _seconds(ttl)
        commands: list[tuple[Any, ...]] = [
            (b"SET", name, record, b"NX", b"EX", seconds) for name, record in guards
        ]
        commands += [(b"EXPIRE", key, seconds) for key in keys]
        *replies, values = self._pipeline([*commands, (b"MGET", *keys)])
        for reply in replies:
            if isinstance(reply, Refusal):
                self._checked(reply, bytes)
        guard_values: list[bytes] = self._checked(values, list)
        if not all(guard_values):
            raise ServerDown(f"{self.name}: a guard vanished while it was made")
        return guard_values

    def replace(self, name: str, seen: bytes, new: bytes, ttl: float) -> bool:
        command = (COMPARE_AND_SET, name, seen, new, _seconds(ttl))
        (reply,) = self._pipeline([command])
        return bool(self._checked(reply, int) == 1)

    def count(self, deltas: Mapping[str, int]) -> None:
        commands = [
            (b"INCRBY", name.encode("ascii"), b"%d" % delta) for name, delta in deltas.items()
        ]
        for reply in self._pipeline(commands):
            self._checked(reply, int)

    def counters(self, names: Sequence[str]) -> list[int]:
        if not names:
            return []
        # Pass the names of counters as bytes. _pipeline() puts the incarnation (a random word) only
        # before names that are str, and counters must survive a new incarnation.
        keys = [name.encode("ascii") for name in names]
        (reply,) = self._pipeline([(b"MGET", *keys)])
        values = self._checked(reply, list)
        if len(values) != len(keys):
            raise self._failed("unexpected number of values")
        return [int(value) if value and value.isdigit() else 0 for value in values]

    def reset_counters(self, names: Sequence[str]) -> None:
        if names:
            # Do not call finish(), which would put the incarnation (a random word) before the names
            # of the counters.
            (reply,) = self._pipeline([(b"UNLINK", *(name.encode("ascii") for name in names))])
            self._checked(reply, int)

    def info(self) -> dict[str, Any]:
        (reply,) = self._pipeline([(b"INFO",)])
        lines = self._checked(reply, bytes).decode(errors="replace").splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)


def _replies(answer: bytes, count: int, owner: bytes) -> list[Any] | None:
    """Parse ``count`` replies, and return all but the last. Return None while the answer is incomplete.

    :param owner: the value of the entry :data:`OWNER` when the connection was opened. If the last
        reply is another value, the server has lost its data or has older data.
    :raises Outdated: the last reply is a different value.
    """
    replies = parse_replies(answer, count)
    if replies is not None and (there := replies.pop()) != owner:
        if isinstance(there, Refusal):
            raise ProtocolError(f"refused: {there.code}")
        raise Outdated("the data are of another incarnation")
    return replies


def _seconds(ttl: float) -> bytes:
    return b"%d" % max(math.ceil(ttl), 1)
