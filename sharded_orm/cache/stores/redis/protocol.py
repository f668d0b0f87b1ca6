"""The protocol of Redis (RESP, version 2): turns commands into bytes, and bytes into replies.

hiredis does the packing and parsing. This module uses no sockets.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any

from hiredis import Reader, pack_command

from sharded_orm.cache.stores.sockets import ProtocolError

#: The bytes with which every reply ends.
LINE_END = b"\r\n"
# Matches a reply that announces an array of a million values or more. hiredis would allocate memory
# for all the values as soon as it reads this number, so such a reply is refused without hiredis.
_HUGE_ARRAY = re.compile(rb"(?:[+:-][^\r]*\r\n|\$-1\r\n)*\*\d{7}")
_INCOMPLETE = object()


class RedisScript:
    """A Lua script that a Redis server runs as one atomic command."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.digest = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()


class Refusal(Exception):
    """The error reply of a server to one command. It is returned like any reply, never raised."""

    def __init__(self, line: str) -> None:
        # Keep only the first word, the code of the error: the other words may quote the command,
        # which may contain a password.
        self.code = (line.split(None, 1) or ["ERR"])[0]


# The types of valid replies. Values of their subclasses are refused, for example a bool, which only
# version 3 of the protocol has.
_REPLIES = frozenset({bytes, int, type(None), list, Refusal})
_VALUES = frozenset({bytes, type(None)})


def pack(commands: Iterable[tuple[Any, ...]], prefix: str = "") -> bytes:
    """Return the bytes of all ``commands``, to be sent in one packet.

    :param commands: tuples of parts. A part that is a str is the name of an entry.
    :param prefix: a text to put before each name of an entry; empty by default.
    """
    # The type is Any, since the type stub of pack_command() accepts only one part.
    parts: Any
    packed = []
    for command in commands:
        parts = tuple([prefix + part if isinstance(part, str) else part for part in command])
        packed.append(pack_command(parts))
    return b"".join(packed)


def by_digest(command: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the command EVALSHA, which runs the script in ``command`` by the script's digest.

    A server that does not know the script replies with the error NOSCRIPT. A command whose first
    part is not a :class:`RedisScript` is returned unchanged.
    """
    script = command[0]
    if isinstance(script, RedisScript):
        return (b"EVALSHA", script.digest, b"1", *command[1:])
    return command


def by_source(command: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the command EVAL, which sends the source of the script in ``command``.

    The first part of ``command`` must be a :class:`RedisScript`.
    """
    return (b"EVAL", command[0].source, b"1", *command[1:])


def parse_replies(answer: bytes, count: int) -> list[Any] | None:
    """Parse ``answer``, which should be ``count`` replies. Return None if a part of the answer has
    not been received yet.

    A reply is bytes, an int, None or a :class:`Refusal`. The reply to MGET is a list of items that
    are bytes or None.

    :raises ProtocolError: ``answer`` is not the beginning of ``count`` such replies.
    """
    if _HUGE_ARRAY.match(answer):
        raise ProtocolError("too many values")
    reader = Reader(ProtocolError, Refusal, None, None, _INCOMPLETE)
    reader.feed(answer)
    replies = [reader.gets() for _ in range(count)]
    if replies[-1] is _INCOMPLETE:
        return None
    if reader.has_data():
        raise ProtocolError("more than was asked for")
    if not _REPLIES.issuperset(map(type, replies)):
        raise ProtocolError("not a reply of Redis")
    for reply in replies:
        if type(reply) is list and not _VALUES.issuperset(map(type, reply)):
            raise ProtocolError("values of another kind")
    return replies
