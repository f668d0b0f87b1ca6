"""What is said to a Redis server and what it answers: version 2 of its protocol (RESP).

It knows nothing of sockets and of what the commands mean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from sharded_orm.cache.stores.sockets import ProtocolError

#: Of every reply.
LINE_END = b"\r\n"
_TEXT = ord("$")


class RedisScript:
    """Runs on the server, as one command."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.digest = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()


def pack_command(command: Sequence[bytes]) -> bytes:
    parts = [b"*%d\r\n" % len(command)]
    parts += [b"$%d\r\n%b\r\n" % (len(part), part) for part in command]
    return b"".join(parts)


def pack_all(commands: Sequence[tuple[Any, ...]], word: bytes) -> bytes:
    """Commands in one packet. A part that is a text is a name: ``word`` and a colon go before it."""
    more = len(word) + 1
    texts = []
    for command in commands:
        texts.append(b"*%d\r\n" % len(command))
        for part in command:
            if isinstance(part, str):
                texts.append(b"$%d\r\n%b:%b\r\n" % (len(part) + more, word, part.encode("ascii")))
            else:
                texts.append(b"$%d\r\n%b\r\n" % (len(part), part))
    return b"".join(texts)


def by_digest(command: tuple[Any, ...]) -> tuple[Any, ...]:
    """The command as it is sent to a server that may know the script in its first place."""
    script = command[0]
    if isinstance(script, RedisScript):
        return (b"EVALSHA", script.digest, b"1", *command[1:])
    return command


def by_source(command: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same for a server that has said that it does not."""
    return (b"EVAL", command[0].source, b"1", *command[1:])


class Refusal:
    """A server's refusal of one command."""

    def __init__(self, line: bytes) -> None:
        # The rest may quote what was sent.
        self.code = line.split(None, 1)[0].decode(errors="replace") if line.strip() else "ERR"


class _Incomplete(Exception):
    pass


def parse_replies(raw: bytes, count: int) -> list[Any] | None:
    """``count`` replies; None if they go on."""
    replies: list[Any] = []
    position = 0
    try:
        for _ in range(count):
            reply, position = _reply(raw, position)
            replies.append(reply)
    except _Incomplete:
        return None
    if position < len(raw):
        raise ProtocolError("more than was asked for")
    return replies


def _reply(raw: bytes, position: int) -> tuple[Any, int]:
    """The reply at ``position`` and where the next one begins."""
    end = raw.find(b"\r\n", position)
    if end < 0:
        raise _Incomplete
    kind, line = raw[position : position + 1], raw[position + 1 : end]
    if kind == b"+":
        return line, end + 2
    if kind == b"-":
        return Refusal(line), end + 2
    try:
        number = int(line)
    except ValueError as exc:
        raise ProtocolError("not a reply of Redis") from exc
    if kind == b":":
        return number, end + 2
    if kind == b"$":
        return _value(raw, end + 2, number)
    if kind != b"*":
        raise ProtocolError("not a reply of Redis")
    position = end + 2
    values = []
    for _ in range(number):
        # Of our commands only MGET has several values, and they are texts.
        end = raw.find(b"\r\n", position)
        if end < 0:
            raise _Incomplete
        try:
            size = int(raw[position + 1 : end])
        except ValueError as exc:
            raise ProtocolError("not a reply of Redis") from exc
        if raw[position] != _TEXT:
            raise ProtocolError("values of another kind")
        value, position = _value(raw, end + 2, size)
        values.append(value)
    return values, position


def _value(raw: bytes, start: int, size: int) -> tuple[bytes | None, int]:
    if size < 0:
        return None, start
    end = start + size
    if raw[end : end + 2] != b"\r\n":
        if len(raw) < end + 2:
            raise _Incomplete
        raise ProtocolError("a value of another size")
    return raw[start:end], end + 2


def parse_texts(raw: bytes, count: int) -> list[Any] | None:
    """What MGET gives if there are ``count`` values and none is empty; else None.

    Sizes are compared one after the other: a value with a line end in it is no such case.
    """
    header, *parts = raw.split(b"\r\n")
    if header != b"*%d" % count or len(parts) != 2 * count + 1:
        return None
    values = parts[1::2]
    if not all(values) or parts[:-1:2] != [b"$%d" % len(value) for value in values]:
        return None
    return values


def parse_lines(raw: bytes, count: int, last: bytes) -> list[Any] | None:
    """``count`` replies of one line each, in front of the text ``last``; None if there is
    anything else."""
    lines = raw.split(b"\r\n")
    if len(lines) != count + 3 or lines[-3:] != [b"$%d" % len(last), last, b""]:
        return None
    replies: list[Any] = []
    for line in lines[:count]:
        if line[:1] == b":" and line[1:].isdigit():
            replies.append(int(line[1:]))
        elif line == b"+OK":
            replies.append(b"OK")
        elif line == b"$-1":
            replies.append(None)
        else:
            return None
    return replies
