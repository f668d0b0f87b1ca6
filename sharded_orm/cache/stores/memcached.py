"""A memcached server, by its meta commands (version 1.6 or newer).

All commands of a call go in one packet, and each has one answer, in their order. Leases are the
server's own: ``mg … N`` on a missing name puts an empty stub there and tells one reader that it
has *won*; the number of that version (``c``) is the lease, with which ``ms … C`` stores only while
nothing else has happened to the entry.
"""

from __future__ import annotations

import math
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pymemcache.client.base import Client, normalize_server_spec

from sharded_orm.cache.stores.base import (
    LEASE_SECONDS,
    MAX_VALUE,
    CacheEntry,
    FoundEntry,
    Lease,
    ServerDown,
)
from sharded_orm.cache.stores.sockets import Connection, ProtocolError, RemoteServer

_NO_ERROR = frozenset({b"VA", b"EN", b"HD", b"NS", b"EX", b"NF"})
#: Longer times (seconds) would be taken for dates.
_MAX_TTL = 30 * 24 * 3600
#: Bytes of one packet of reads. Were it larger than the buffers on the way, the server would
#: wait for us to read, and we for the server.
_MAX_READ = 64 * 1024
#: Bytes of one packet under TLS, unless it is one command. A server that takes a part of a TLS
#: record for the end of a long value forgets the commands in the rest of that record.
_MAX_RECORD = 16_000
#: What of an alias's OPTIONS matters for a connection; the rest is about pickles and hashing.
_OPTIONS = frozenset({"connect_timeout", "socket_keepalive", "socket_module", "tls_context"})

#: What follows a name that is read, and comes before the next one.
_PLAIN, _LEASED = " v\r\nmg ", f" v c N{LEASE_SECONDS}\r\nmg "

#: The first line of an answer without its end, and the value if it has one.
_Answer = tuple[bytes, bytes | None]
#: What a read gives.
_Reading = tuple[list[bytes | None], list[FoundEntry], list[bytes | None]]


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
        :param options: of pymemcache's ``Client``; those about connecting are used.
        :param timeout, backoff, clock: see :class:`RemoteServer`.
        """
        super().__init__(f"memcached {address}", timeout=timeout, backoff=backoff, clock=clock)
        self._address = normalize_server_spec(address)
        self._options = {k: v for k, v in (options or {}).items() if k in _OPTIONS}
        is_secure = self._options.get("tls_context") is not None
        self._most_written = _MAX_RECORD if is_secure else sys.maxsize
        self._most_read = _MAX_RECORD if is_secure else _MAX_READ

    def _connect(self, timeout: float) -> Connection:
        options = {**self._options}
        options["connect_timeout"] = min(timeout, options.get("connect_timeout") or timeout)
        # Without no_delay the second part of a packet would wait for an acknowledgement.
        client = Client(self._address, no_delay=True, **options)
        # Resolves, connects and speaks TLS. Private, but what all its commands call.
        client._connect()
        opened: socket.socket = client.sock
        return Connection(opened, self.timeout)

    def _run(self, commands: list[bytes], most: int = 0) -> list[_Answer]:
        """Answers to ``commands``, in one round trip if they have ``most`` bytes or less."""
        most = most or self._most_written
        packet, count = b"".join(commands), len(commands)
        if len(packet) <= most or count == 1:
            return self._exchange(packet, lambda answer: _parse(answer, count))
        answers: list[_Answer] = []
        group: list[bytes] = []
        size = 0
        for command in commands:
            if group and size + len(command) > most:
                answers += self._run(group, most)
                group, size = [], 0
            group.append(command)
            size += len(command)
        return answers + self._run(group, most)

    def _value(self, answer: _Answer) -> bytes | None:
        line, value = answer
        # It has no memory for the answer or a stub: as good as a miss.
        if value is None and line != b"EN" and not line.startswith(b"SERVER_ERROR"):
            raise self._failed("unexpected answer to a read")
        return value or None

    def _found(self, answer: _Answer) -> FoundEntry:
        line, value = answer
        if value is None:
            return FoundEntry(self._value(answer))
        _, _, *flags = line.split()
        if not flags or flags[0][:1] != b"c":
            raise self._failed("a value without its version")
        version = flags[0][1:]
        if value or b"Z" not in flags:
            return FoundEntry(value or None, version)
        return FoundEntry(None)  # leased to somebody else

    def _expect(self, answer: _Answer, *lines: bytes) -> bool:
        """Whether it is the first of ``lines``."""
        if answer[0] in lines:
            return answer[0] == lines[0]
        if answer[0].startswith(b"SERVER_ERROR"):
            # Out of memory, for this one: the server is well, the caller has failed.
            raise ServerDown(f"{self.name}: {answer[0][:80].decode(errors='replace')}")
        raise self._failed("unexpected answer to a write")

    # ##### The contract #####

    def read(
        self, names: Sequence[str], objects: Sequence[str] = (), again: Sequence[str] = ()
    ) -> tuple[list[bytes | None], list[FoundEntry], list[bytes | None]]:
        middle, last = len(names), len(names) + len(objects)
        count = last + len(again)
        if not count:
            return [], [], []
        packet = _reads(names, objects, again)
        if len(packet) > self._most_read and count > 1:
            commands = packet.splitlines(keepends=True)
            return self._sorted(self._run(commands, self._most_read), middle, last)

        def parse(raw: bytes) -> _Reading | None:
            # Nearly always everything is there.
            found = _hits(raw, middle, last, count)
            if found is None and (answers := _parse(raw, count)) is not None:
                return self._sorted(answers, middle, last)
            return found

        return self._exchange(packet, parse)

    def _sorted(self, answers: list[_Answer], middle: int, last: int) -> _Reading:
        return (
            list(map(self._value, answers[:middle])),
            list(map(self._found, answers[middle:last])),
            list(map(self._value, answers[last:])),
        )

    def lease(self, objects: Sequence[str], found: Sequence[FoundEntry]) -> list[Lease | None]:
        return [_version(lease) if lease else None for _, lease in found]

    def fill(
        self, entries: Sequence[CacheEntry], ttl: float, again: Sequence[str] = ()
    ) -> tuple[list[bool], list[bytes | None]]:
        seconds = _seconds(ttl)
        parts, stored = [], []
        for name, value, lease in entries:
            fits = 0 < len(value) <= MAX_VALUE
            stored.append(fits)
            if fits:
                condition = b" C" + _version(lease) if lease is not None else b""
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

    def _is_stored(self, answer: _Answer) -> bool:
        if answer[0].startswith(b"SERVER_ERROR"):
            return False  # too large after all, or no memory
        return self._expect(answer, b"HD", b"EX", b"NF", b"NS")

    def mark(self, records: Sequence[tuple[str, bytes]], header: bytes, ttl: float) -> list[int]:
        seconds = _seconds(ttl)
        parts: list[bytes] = []
        for name, record in records:
            key = name.encode("ascii")
            # An append does not create what is missing. The last one tells the size, and
            # prolongs the life of a guard that was there.
            parts += (
                b"ms %b %d ME T%d\r\n%b\r\n" % (key, len(header), seconds, header),
                b"ms %b %d MA\r\n%b\r\n" % (key, len(record), record),
                b"mg %b s T%d\r\n" % (key, seconds),
            )
        if not parts:
            return []
        answers = self._run(parts)
        sizes = []
        for made, appended, size in zip(answers[::3], answers[1::3], answers[2::3], strict=True):
            self._expect(made, b"HD", b"NS")
            if not self._expect(appended, b"HD", b"NS") or not size[0].startswith(b"HD s"):
                raise ServerDown(f"{self.name}: a guard vanished while it was marked")
            sizes.append(int(size[0][4:]))
        return sizes

    def finish(self, objects: Sequence[str], records: Sequence[tuple[str, bytes]]) -> None:
        parts = [b"md %b\r\n" % name.encode("ascii") for name in objects]
        parts += [
            b"ms %b %d MA\r\n%b\r\n" % (name.encode("ascii"), len(record), record)
            for name, record in records
        ]
        if not parts:
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
        there = []
        for made, answer in zip(answers[::2], answers[1::2], strict=True):
            self._expect(made, b"HD", b"NS")
            value = self._value(answer)
            if value is None:
                raise ServerDown(f"{self.name}: a guard vanished while it was made")
            there.append(value)
        return there

    def replace(self, name: str, seen: bytes, new: bytes, ttl: float) -> bool:
        key = name.encode("ascii")
        (there,) = self._run([b"mg %b v c\r\n" % key])
        if self._value(there) != seen:
            return False
        lease: bytes = self._found(there).lease or b""
        (answer,) = self._run(
            [b"ms %b %d C%b T%d\r\n%b\r\n" % (key, len(new), lease, _seconds(ttl), new)]
        )
        return self._expect(answer, b"HD", b"EX", b"NF")

    def count(self, deltas: Mapping[str, int]) -> None:
        parts = [
            # A missing counter is made with the first delta.
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
        return self._exchange(b"stats\r\n", _parse_stats)


def _seconds(ttl: float) -> int:
    # 0 would be for ever.
    return min(max(math.ceil(ttl), 1), _MAX_TTL)


def _reads(names: Sequence[str], objects: Sequence[str], again: Sequence[str]) -> bytes:
    """Commands that read."""
    text = f"mg {_PLAIN.join(names)}{_PLAIN[:-3]}" if names else ""
    if objects:
        text += f"mg {_LEASED.join(objects)}{_LEASED[:-3]}"
    if again:
        text += f"mg {_PLAIN.join(again)}{_PLAIN[:-3]}"
    return text.encode("ascii")


def _hits(raw: bytes, middle: int, last: int, count: int) -> _Reading | None:
    """What a read gives if there are ``count`` values and none is empty; else None.

    Sizes are compared one after the other: a value with a line end in it is no such case. The
    lease of an object is its whole first line, from which :func:`_version` takes what counts:
    hardly one of them is asked for.
    """
    parts = raw.split(b"\r\n")
    if len(parts) != 2 * count + 1:
        return None
    names: list[bytes | None] = []
    found: list[FoundEntry] = []
    again: list[bytes | None] = []
    # Of one length, but for the nothing that follows the last line end.
    pairs = zip(parts[::2], parts[1::2], strict=False)
    for position, (line, value) in enumerate(pairs):
        if not value:
            return None
        if middle <= position < last:
            if not line.startswith(b"VA %d c" % len(value)):
                return None
            # As Found(value, line), in half the time.
            found.append(tuple.__new__(FoundEntry, (value, line)))
        elif line != b"VA %d" % len(value):
            return None
        else:
            (names if position < middle else again).append(value)
    return names, found, again


def _version(lease: bytes) -> bytes:
    """The number in a lease, which may be a whole line: ``VA 150 c1234``."""
    return lease.rpartition(b" c")[2].split(None, 1)[0]


def _parse(raw: bytes, count: int) -> list[_Answer] | None:
    """``count`` answers; None if they go on."""
    answers: list[_Answer] = []
    position = 0
    find = raw.find
    for _ in range(count):
        end = find(b"\r\n", position)
        if end < 0:
            return None
        line = raw[position:end]
        if line[:3] == b"VA ":
            try:
                size = int(line.split(None, 2)[1])
            except (ValueError, IndexError) as exc:
                raise ProtocolError("a value without a size") from exc
            stop = end + 2 + size
            if size < 0 or raw[stop : stop + 2] != b"\r\n":
                if size >= 0 and len(raw) < stop + 2:
                    return None
                raise ProtocolError("a value of another size")
            answers.append((line, raw[end + 2 : stop]))
            position = stop + 2
        else:
            if line[:2] not in _NO_ERROR and not line.startswith(b"SERVER_ERROR"):
                # Not repeated here: who knows what it is.
                raise ProtocolError("not an answer of memcached")
            answers.append((line, None))
            position = end + 2
    if position < len(raw):
        raise ProtocolError("more than was asked for")
    return answers


def _parse_stats(raw: bytes) -> dict[str, Any] | None:
    if not raw.endswith(b"END\r\n"):
        return None
    found = re.findall(rb"STAT (\S+) (.*)\r\n", raw)
    if not found:
        raise ProtocolError("no statistics")
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, value in found}
