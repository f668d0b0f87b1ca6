"""The packets that announce a write of rows to a Redis server.

Before a transaction commits, :func:`mark_packet` appends a line (an open marker) to the guards of
its rows. After the commit, :func:`finish_packet` deletes the rows from the cache and appends the
lines that close the markers.

This module makes the bytes of these packets itself, because hiredis would take twice as long. It
compares each answer with the usual one; only other answers need a parser.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sharded_orm.cache.stores.redis.login import LENGTH, OWNER
from sharded_orm.cache.stores.redis.protocol import by_source, pack
from sharded_orm.cache.stores.redis.scripts import APPEND


def _bulk(value: bytes) -> bytes:
    """Return ``value`` in the notation of the protocol: its length, then its bytes."""
    return b"$%d\r\n%b\r\n" % (len(value), value)


_READ_OWNER = b"*2\r\n$3\r\nGET\r\n" + _bulk(OWNER)
# Send the text of the script with EVAL. EVALSHA would send only the digest of the text, and would
# fail if the server did not know the script. This failure would be noticed too late, because the
# answer to the packet is read only when the connection is used again.
_APPEND = b"*5\r\n$4\r\nEVAL\r\n" + _bulk(APPEND.source) + b"$1\r\n1\r\n"
_CREATED = frozenset({b"$-1", b"+OK"})


def mark_packet(
    records: Sequence[tuple[str, bytes]], header: bytes, seconds: bytes, owner: bytes
) -> bytes:
    """Return the commands that append a line to each of several guards. They create missing guards.

    A guard is an entry that says whether other entries are valid.

    :param records: pairs (name of a guard, line to append).
    :param header: the first line of a guard that is created.
    :param seconds: how long each guard lives.
    :param owner: the value of the entry :data:`OWNER`. It ends with the incarnation, the random
        word before all names of entries. The last command of the packet reads this entry again.
    """
    prefix = owner[-LENGTH:] + b":"
    life = _bulk(seconds)
    first = b"%b$2\r\nNX\r\n$2\r\nEX\r\n%b*3\r\n$6\r\nAPPEND\r\n" % (_bulk(header), life)
    packet = b""
    for name, record in records:
        key = _bulk(prefix + name.encode())
        packet += b"*6\r\n$3\r\nSET\r\n%b%b%b%b*3\r\n$6\r\nEXPIRE\r\n%b%b" % (
            key, first, key, _bulk(record), key, life,
        )  # fmt: skip
    return packet + _READ_OWNER


def marked_sizes(answer: bytes, count: int, owner: bytes) -> list[int] | None:
    """Return the sizes in bytes of ``count`` guards, from the answer to :func:`mark_packet`.

    Return None if the answer is incomplete, or if a command had another result than usual. The
    caller then uses a slower parser.
    """
    end = _bulk(owner)
    if not answer.endswith(end):
        return None
    lines = answer[: -len(end)].split(b"\r\n")
    sizes = [line[1:] for line in lines[1::3] if line.startswith(b":")]
    if (
        len(lines) != 3 * count + 1
        or lines[-1]
        or not _CREATED.issuperset(lines[:-1:3])
        or lines[2::3] != [b":1"] * count
        or len(sizes) != count
        or not all(map(bytes.isdigit, sizes))
    ):
        return None
    return [*map(int, sizes)]


def finish_packet(
    objects: Sequence[str], records: Sequence[tuple[str, bytes]], owner: bytes
) -> bytes:
    """Return the commands that delete objects, and append a line to each of several guards.

    A guard is an entry that says whether other entries are valid.

    :param objects: names of objects (cached rows).
    :param records: pairs (name of a guard, line to append).
    :param owner: as in :func:`mark_packet`.
    """
    prefix = owner[-LENGTH:] + b":"
    packet = b""
    if objects:
        packet = b"*%d\r\n$6\r\nUNLINK\r\n" % (len(objects) + 1)
        for name in objects:
            packet += _bulk(prefix + name.encode())
    for name, record in records:
        packet += b"%b%b%b" % (_APPEND, _bulk(prefix + name.encode()), _bulk(record))
    return packet + _READ_OWNER


def script_packet(commands: Sequence[tuple[Any, ...]], owner: bytes) -> bytes:
    """Return the commands that run scripts by their text.

    :param commands: tuples (script, name of an entry, arguments of the script…).
    :param owner: as in :func:`mark_packet`.
    """
    return pack(map(by_source, commands), f"{owner[-LENGTH:].decode()}:") + _READ_OWNER


def are_numbers(answer: bytes, count: int, owner: bytes) -> bool:
    """Whether ``answer`` is ``count`` numbers, followed by ``owner``.

    This is the usual answer to a packet such as :func:`finish_packet`. It shows two things. All
    commands were executed, because the reply to a command that fails is an error and not a number.
    And the server has not lost its data, because its owner would be another value then.
    """
    end = _bulk(owner)
    if not answer.endswith(end):
        return False
    lines = answer[: -len(end)].split(b"\r\n")
    numbers = [line[1:] for line in lines if line.startswith(b":")]
    return (
        len(lines) == count + 1
        and not lines[-1]
        and len(numbers) == count
        and all(map(bytes.isdigit, numbers))
    )
