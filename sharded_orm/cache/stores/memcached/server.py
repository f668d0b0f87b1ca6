"""A memcached server (version 1.6 or newer), used through its meta commands.

All commands of a call are sent in one packet. The server answers each command, in the same order.

A *lease* is the permission to store a missing object. memcached supports leases itself: ``mg … N``
for a missing name creates an empty entry, and tells one reader that it has *won*. The lease is the
version number of this entry (flag ``c``): ``ms … C`` with the number stores a value only if nobody
else has changed the entry.
"""

from __future__ import annotations

import math
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pymemcache.client.base import Client, normalize_server_spec

from sharded_orm.cache.stores.base import (
    MAX_VALUE,
    CacheEntry,
    FoundEntry,
    Lease,
    Reply,
    ServerDown,
)
from sharded_orm.cache.stores.memcached.protocol import (
    Answer,
    get_packet,
    marked_sizes,
    parse_answers,
    parse_hits,
    parse_stats,
    parse_values,
    read_packet,
    version_of,
)
from sharded_orm.cache.stores.sockets import (
    UNCHANGED,
    Connection,
    RemoteServer,
    Unchanged,
)

#: The answers that confirm the commands of finish(), which delete entries and append to entries:
#: the command was executed, or the entry is missing, so there is nothing to delete or append to.
_DONE = frozenset({b"HD", b"NF", b"NS"})
#: The longest life of an entry in seconds. memcached takes a larger number for a Unix time.
_MAX_TTL = 30 * 24 * 3600
#: The most bytes in one packet of reading commands. If a packet were larger than the network
#: buffers, client and server could block each other: each would send, and neither would receive.
_MAX_READ = 64 * 1024
#: The most bytes of a packet under TLS, so that the packet fits into one TLS record. If a long
#: value ended inside a record, the server would lose the commands in the rest of that record. A
#: packet may be longer only if it has a single command.
_MAX_RECORD = 16_000
#: The keys of the OPTIONS of an alias that this module uses. All of them concern connecting. Other
#: options, for example about pickling and hashing, are ignored.
_OPTIONS = frozenset({"connect_timeout", "socket_keepalive", "socket_module", "tls_context"})

#: The number of commands of one packet that a server answers at once. It sends the other answers
#: later, in separate parts. This is the default of the server's option ``-R``.
_AT_ONCE = 20
#: The largest number of names that are read with one command ``get``. For many more names, the
#: answer to ``get`` takes more processor time than the answers to ``mg``, so ``mg`` is used.
_MOST_BY_GET = 200
#: The answer to ``mn``, a command that does nothing. It shows that all earlier answers are here.
_NOTHING = b"MN\r\n"


class MemcachedServer(RemoteServer):
    """One memcached server. Thread-safe."""

    _end = b"\r\n"

    def __init__(
        self,
        address: str,
        options: Mapping[str, Any] | None = None,
        *,
        timeout: float,
        backoff: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        :param address: ``host:port``, ``[IPv6]:port``, ``unix:/path`` or ``/path``.
        :param options: options of pymemcache's ``Client``; only those for connecting are used.
        :param timeout, backoff, clock: see :class:`RemoteServer`.
        """
        super().__init__(f"memcached {address}", timeout=timeout, backoff=backoff, clock=clock)
        self._address = normalize_server_spec(address)
        self._options = {k: v for k, v in (options or {}).items() if k in _OPTIONS}
        is_secure = self._options.get("tls_context") is not None
        self._max_write = _MAX_RECORD if is_secure else sys.maxsize
        self._max_read = _MAX_RECORD if is_secure else _MAX_READ

    def _connect(self, timeout: float) -> Connection:
        options = {**self._options}
        options["connect_timeout"] = min(timeout, options.get("connect_timeout") or timeout)
        # Set no_delay. Otherwise the operating system would hold back the second part of a long
        # packet until the server has acknowledged the first part.
        client = Client(self._address, no_delay=True, **options)
        # Call the client's method _connect(), which resolves the address, connects and starts TLS.
        # The method is private, but it is unlikely to vanish: all commands of the client call it.
        client._connect()
        opened: socket.socket = client.sock
        return Connection(opened, self.timeout)

    def _run(self, commands: list[bytes], max_size: int = 0) -> list[Answer]:
        """Send ``commands`` and return their answers.

        :param max_size: the most bytes of a packet; each packet takes one round trip. A longer
            command is sent in a separate packet. 0 (the default) means ``self._max_write``.
        """
        max_size = max_size or self._max_write
        packet, count = b"".join(commands), len(commands)
        if len(packet) <= max_size or count == 1:
            return self._exchange(packet, lambda answer: parse_answers(answer, count))
        answers: list[Answer] = []
        group: list[bytes] = []
        size = 0
        for command in commands:
            if group and size + len(command) > max_size:
                answers += self._run(group, max_size)
                group, size = [], 0
            group.append(command)
            size += len(command)
        return answers + self._run(group, max_size)

    def _value(self, answer: Answer) -> bytes | None:
        line, value = answer
        # SERVER_ERROR means that the server lacks memory: for the answer, or for the empty entry
        # that it creates for a lease. The entry then counts as missing.
        if value is None and line != b"EN" and not line.startswith(b"SERVER_ERROR"):
            raise self._failed("unexpected answer to a read")
        return value or None

    def _entry(self, answer: Answer) -> FoundEntry:
        line, value = answer
        if value is None:
            return FoundEntry(self._value(answer))
        _, _, *flags = line.split()
        if not flags or flags[0][:1] != b"c":
            raise self._failed("a value without its version")
        version = flags[0][1:]
        if value or b"Z" not in flags:
            return FoundEntry(value or None, version)
        # The entry is empty and leased to another reader, so it counts as missing.
        return FoundEntry(None)

    def _expect(self, answer: Answer, *lines: bytes) -> bool:
        """Check the server's answer to a write. Return whether the write was done.

        :param lines: the permitted answers. The first one means that the write was done. The others
            mean that it was not, for example because a condition was not met.
        :raises ServerDown: the answer is not one of ``lines``.
        """
        if answer[0] in lines:
            return answer[0] == lines[0]
        if answer[0].startswith(b"SERVER_ERROR"):
            # The server lacks memory for this command, but can execute other commands. So do not
            # call _failed(): after that, the server would not be used for some seconds.
            raise ServerDown(f"{self.name}: {answer[0][:80].decode(errors='replace')}")
        raise self._failed("unexpected answer to a write")

    # ##### The methods of CacheServer #####

    def read(
        self, names: Sequence[str], objects: Sequence[str] = (), again: Sequence[str] = ()
    ) -> Reply:
        middle, last = len(names), len(names) + len(objects)
        count = last + len(again)
        if not count:
            return [], [], []
        if (
            count == middle
            and _AT_ONCE < count <= _MOST_BY_GET
            and len(packet := get_packet(names)) <= self._max_read
        ):
            return self._exchange(packet, lambda raw: parse_values(raw, names)), [], []
        packet = read_packet(names, objects, again)
        if len(packet) > self._max_read and count > 1:
            commands = packet.splitlines(keepends=True)
            return self._reply(self._run(commands, self._max_read), middle, last)

        def parse(raw: bytes) -> Reply | None:
            # Try the fast parser first. It works only if all entries were found, which is usual.
            reply = parse_hits(raw, middle, last, count)
            if reply is None and (answers := parse_answers(raw, count)) is not None:
                return self._reply(answers, middle, last)
            return reply

        if count <= _AT_ONCE:
            return self._exchange(packet, parse)
        # The server sends the answers to so many commands in several parts. Add the command ``mn``,
        # which does nothing. Its answer comes last, so the answers are parsed only once: when all
        # parts have arrived.
        return self._exchange(
            packet + b"mn\r\n", lambda raw: parse(raw.removesuffix(_NOTHING)), end=_NOTHING
        )

    def read_again(
        self, names: Sequence[str], name: str, values: tuple[bytes, ...], value: bytes
    ) -> Reply | None:
        middle = len(names)
        # Build the answer that the server sends if nothing has changed, to compare it with the real
        # answer. Only the version number of the object, which follows " c", is not known.
        start = b"".join([b"VA %d\r\n%b\r\n" % (len(known), known) for known in values])
        start += b"VA %d c" % len(value)
        end = b"\r\n%b\r\n" % value

        def parse(raw: bytes) -> Reply | Unchanged | None:
            if (
                raw.startswith(start)
                and raw.endswith(end)
                and raw[len(start) : -len(end)].isdigit()
            ):
                return UNCHANGED
            reply = parse_hits(raw, middle, middle + 1, middle + 1)
            if reply is None and (answers := parse_answers(raw, middle + 1)) is not None:
                return self._reply(answers, middle, middle + 1)
            return reply

        reply: Any = self._exchange(read_packet(names, (name,), ()), parse)
        return None if reply is UNCHANGED else reply

    def _reply(self, answers: list[Answer], middle: int, last: int) -> Reply:
        return (
            list(map(self._value, answers[:middle])),
            list(map(self._entry, answers[middle:last])),
            list(map(self._value, answers[last:])),
        )

    def lease(self, objects: Sequence[str], entries: Sequence[FoundEntry]) -> list[Lease | None]:
        return [version_of(lease) if lease else None for _, lease in entries]

    def release(self, objects: Mapping[str, FoundEntry]) -> None:
        # Give back only the leases (permissions to store) of missing objects: these keep other
        # readers from storing the object. The lease of an object that was found is only the
        # object's version number.
        parts = [
            b"md %b C%b\r\n" % (name.encode("ascii"), version_of(lease))
            for name, (value, lease) in objects.items()
            if value is None and lease is not None
        ]
        if not parts:
            return
        count, packet = len(parts), b"".join(parts)

        def is_read(raw: bytes) -> bool | None:
            return None if parse_answers(raw, count) is None else True

        # The packet gives the leases back. If it is lost, nothing needs to be done (the empty
        # lambda), because leases end by themselves after a few seconds.
        if len(packet) > self._max_write or not self._post(packet, is_read, lambda: None):
            for answer in self._run(parts):
                self._expect(answer, b"HD", b"EX", b"NF")

    def fill(
        self, entries: Sequence[CacheEntry], ttl: float, again: Sequence[str] = ()
    ) -> tuple[list[bool], list[bytes | None]]:
        seconds = _seconds(ttl)
        parts, stored = [], []
        for name, value, lease in entries:
            fits = 0 < len(value) <= MAX_VALUE
            stored.append(fits)
            if fits:
                condition = b" C" + version_of(lease) if lease is not None else b""
                parts.append(
                    b"ms %b %d%b T%d\r\n%b\r\n"
                    % (name.encode("ascii"), len(value), condition, seconds, value)
                )
        count = len(parts)
        guards_live = _seconds(2 * ttl)
        parts += [b"mg %b v T%d\r\n" % (name.encode("ascii"), guards_live) for name in again]
        if not parts:
            return stored, []
        answers = self._run(parts)
        outcomes = iter(answers[:count])
        return (
            [fits and self._is_stored(next(outcomes)) for fits in stored],
            list(map(self._value, answers[count:])),
        )

    def _is_stored(self, answer: Answer) -> bool:
        if answer[0].startswith(b"SERVER_ERROR"):
            # The entry was not stored: its value is too large for this server, or the server lacks
            # memory.
            return False
        return self._expect(answer, b"HD", b"EX", b"NF", b"NS")

    def mark(self, records: Sequence[tuple[str, bytes]], header: bytes, ttl: float) -> list[int]:
        seconds = _seconds(ttl)
        parts: list[bytes] = []
        for name, record in records:
            key = name.encode("ascii")
            # A guard is an entry that says whether other entries are valid. Send three commands for
            # each guard: create it if it is missing (ME); append the record (MA, which does not
            # create a missing entry); read the size of the guard and prolong its life (mg).
            parts += (
                b"ms %b %d ME T%d\r\n%b\r\n" % (key, len(header), seconds, header),
                b"ms %b %d MA\r\n%b\r\n" % (key, len(record), record),
                b"mg %b s T%d\r\n" % (key, seconds),
            )
        if not parts:
            return []
        packet, count = b"".join(parts), len(records)
        if len(packet) <= self._max_write:
            usual: list[int] | None = None

            def parse(raw: bytes) -> list[Answer] | None:
                nonlocal usual
                usual = marked_sizes(raw, count)
                return [] if usual is not None else parse_answers(raw, 3 * count)

            answers = self._exchange(packet, parse)
            if usual is not None:
                return usual
        else:
            answers = self._run(parts)
        sizes = []
        for created, appended, size in zip(answers[::3], answers[1::3], answers[2::3], strict=True):
            self._expect(created, b"HD", b"NS")
            if not self._expect(appended, b"HD", b"NS") or not size[0].startswith(b"HD s"):
                raise ServerDown(f"{self.name}: a guard vanished while it was marked")
            sizes.append(int(size[0][4:]))
        return sizes

    def finish(
        self,
        objects: Sequence[str],
        records: Sequence[tuple[str, bytes]],
        lost: Callable[[], object] | None = None,
    ) -> None:
        parts = [b"md %b\r\n" % name.encode("ascii") for name in objects]
        parts += [
            b"ms %b %d MA\r\n%b\r\n" % (name.encode("ascii"), len(record), record)
            for name, record in records
        ]
        if not parts:
            return
        count, packet = len(parts), b"".join(parts)

        def is_confirmed(raw: bytes) -> bool | None:
            lines = raw.split(b"\r\n")
            if len(lines) == count + 1 and not lines.pop() and _DONE.issuperset(lines):
                return True
            answers = parse_answers(raw, count)
            return None if answers is None else _DONE.issuperset([line for line, _ in answers])

        if (
            lost is not None
            and len(packet) <= self._max_write
            and self._post(packet, is_confirmed, lost)
        ):
            return
        answers = self._run(parts)
        for answer in answers[: len(objects)]:
            self._expect(answer, b"HD", b"NF")
        for answer in answers[len(objects) :]:
            self._expect(answer, b"HD", b"NS")

    def add(self, guards: Sequence[tuple[str, bytes]], ttl: float) -> list[bytes]:
        seconds = _seconds(ttl)
        parts: list[bytes] = []
        for name, record in guards:
            key = name.encode("ascii")
            parts += (
                b"ms %b %d ME T%d\r\n%b\r\n" % (key, len(record), seconds, record),
                b"mg %b v T%d\r\n" % (key, seconds),
            )
        if not parts:
            return []
        answers = self._run(parts)
        values = []
        for created, answer in zip(answers[::2], answers[1::2], strict=True):
            self._expect(created, b"HD", b"NS")
            value = self._value(answer)
            if value is None:
                raise ServerDown(f"{self.name}: a guard vanished while it was made")
            values.append(value)
        return values

    def replace(self, name: str, seen: bytes, new: bytes, ttl: float) -> bool:
        key = name.encode("ascii")
        (answer,) = self._run([b"mg %b v c\r\n" % key])
        if self._value(answer) != seen:
            return False
        lease: bytes = self._entry(answer).lease or b""
        (answer,) = self._run(
            [b"ms %b %d C%b T%d\r\n%b\r\n" % (key, len(new), lease, _seconds(ttl), new)]
        )
        return self._expect(answer, b"HD", b"EX", b"NF")

    def count(self, deltas: Mapping[str, int]) -> None:
        parts = [
            # The flags N0 and J make the server create a missing counter, with ``delta`` as its
            # value. Such a counter never expires.
            b"ma %b N0 J%d D%d\r\n" % (name.encode("ascii"), delta, delta)
            for name, delta in deltas.items()
        ]
        if parts:
            for answer in self._run(parts):
                self._expect(answer, b"HD")

    def counters(self, names: Sequence[str]) -> list[int]:
        values, _, _ = self.read(names)
        return [int(value) if value and value.strip().isdigit() else 0 for value in values]

    def info(self) -> dict[str, Any]:
        return self._exchange(b"stats\r\n", parse_stats)


def _seconds(ttl: float) -> int:
    # Return at least 1, because a lifetime of 0 seconds means to memcached that an entry never
    # expires.
    return min(max(math.ceil(ttl), 1), _MAX_TTL)
