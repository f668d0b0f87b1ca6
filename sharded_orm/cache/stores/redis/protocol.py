"""Version 2 of the protocol of Redis (RESP): commands as bytes, and the replies in an answer.

hiredis packs and parses. This module knows neither sockets nor the meaning of a command.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any

from hiredis import Reader, pack_command

from sharded_orm.cache.stores.sockets import ProtocolError

#: The end of every reply.
LINE_END = b"\r\n"
# hiredis makes room for all values of an array when it reads their number.
_HUGE_ARRAY = re.compile(rb"(?:[+:-][^\r]*\r\n|\$-1\r\n)*\*\d{7}")
_INCOMPLETE = object()


class RedisScript:
    """A Lua script that a server runs as one command."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.digest = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()


class Refusal(Exception):
    """A server's refusal of one command. It is a reply, and never raised."""

    def __init__(self, line: str) -> None:
        # The other words may quote the command.
        self.code = (line.split(None, 1) or ["ERR"])[0]


# Version 3 of the protocol has more, which must not pass for these: True is an int.
_REPLIES = frozenset({bytes, int, type(None), list, Refusal})
_VALUES = frozenset({bytes, type(None)})


def pack(commands: Iterable[tuple[Any, ...]], prefix: str = "") -> bytes:
    """Commands in one packet. ``prefix`` goes before each part that is a str: an entry's name."""
    parts: Any  # The stub of pack_command() says that a command has one part.
    packed = []
    for command in commands:
        parts = tuple([prefix + part if isinstance(part, str) else part for part in command])
        packed.append(pack_command(parts))
    return b"".join(packed)


def by_digest(command: tuple[Any, ...]) -> tuple[Any, ...]:
    """The command for a server that may know the script in its first place."""
    script = command[0]
    if isinstance(script, RedisScript):
        return (b"EVALSHA", script.digest, b"1", *command[1:])
    return command


def by_source(command: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same for a server that does not know the script."""
    return (b"EVAL", command[0].source, b"1", *command[1:])


def parse_replies(answer: bytes, count: int) -> list[Any] | None:
    """The ``count`` replies in ``answer``; None while it is incomplete.

    Replies are bytes, int, None, :class:`Refusal`, or for MGET a list of bytes and None.

    :raises ProtocolError: ``answer`` is anything else.
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
