"""Makes the packets of commands that read from memcached, and parses the answers of memcached."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sharded_orm.cache.stores.base import LEASE_SECONDS, FoundEntry, Reply
from sharded_orm.cache.stores.sockets import ProtocolError

# The valid answers to the command that creates a guard (an entry that says whether other entries
# are valid): HD if the guard was created, NS if it existed already.
_CREATED = frozenset({b"HD", b"NS"})
_NO_ERROR = frozenset({b"VA", b"EN", b"HD", b"NS", b"EX", b"NF"})

#: The text between two names in a packet of ``mg`` (read) commands: the end of one command and the
#: beginning of the next. With ``_PLAIN`` the commands only read the entries. With ``_LEASED`` they
#: also request a lease (permission to store) of each entry, whether it is found or missing.
_PLAIN, _LEASED = " v\r\nmg ", f" v c N{LEASE_SECONDS}\r\nmg "


#: The answer to one command: its first line without the line end, and the value, or None if the
#: answer has no value.
Answer = tuple[bytes, bytes | None]


# ##### The command mg #####


def read_packet(names: Sequence[str], objects: Sequence[str], again: Sequence[str]) -> bytes:
    """Return a packet of ``mg`` commands that read the entries of all three lists of names.

    The commands for ``objects`` also request a lease (permission to store) of each object, whether
    it is found or missing.
    """
    text = f"mg {_PLAIN.join(names)}{_PLAIN[:-3]}" if names else ""
    if objects:
        text += f"mg {_LEASED.join(objects)}{_LEASED[:-3]}"
    if again:
        text += f"mg {_PLAIN.join(again)}{_PLAIN[:-3]}"
    return text.encode("ascii")


def parse_hits(raw: bytes, middle: int, last: int, count: int) -> Reply | None:
    """Parse the answers to a read in the usual case: all entries were found.

    Return None in every other case: an entry is missing, or a value is empty or contains a line
    end. The caller then uses the slower :func:`parse_answers`.

    The lease (permission to store) that is returned for an object is the whole first line of its
    answer, such as ``VA 150 c1234``. Most leases are never used, so the version number (1234) is
    cut out later, by :func:`version_of`, and only if the lease is used.

    :param middle: the position of the first answer about an object.
    :param last: the position after the last answer about an object. All answers from ``middle`` to
        here are about objects.
    :param count: the number of all answers.
    """
    parts = raw.split(b"\r\n")
    if len(parts) != 2 * count + 1:
        return None
    # The last part is the empty text after the last line end.
    lines, values = parts[:-1:2], parts[1::2]
    # Make the tuples without calling FoundEntry(value, line), which takes twice the time.
    new = tuple.__new__
    if count <= _FEW:
        objects = []
        for position, (line, value) in enumerate(zip(lines, values, strict=True)):
            if not value:
                return None
            if middle <= position < last:
                if not line.startswith(_leased_line(len(value))):
                    return None
                objects.append(new(FoundEntry, (value, line)))
            elif line != _value_line(len(value)):
                return None
        return [*values[:middle]], objects, [*values[last:]]
    # There are many answers. Check all of them by a few calls, which takes less time than a loop.
    if not all(values):
        return None
    before, found, after = values[:middle], values[middle:last], values[last:]
    if lines[:middle] + lines[last:] != list(map(_value_line, map(len, before + after))):
        return None
    leases = lines[middle:last]
    if not all(map(bytes.startswith, leases, map(_leased_line, map(len, found)))):
        return None
    objects = [new(FoundEntry, pair) for pair in zip(found, leases, strict=True)]
    return [*before], objects, [*after]


# Up to so many answers are parsed one by one.
_FEW = 12
# The first line of an answer, by the size of the value. The lines are cached, because most values
# have one of a few sizes.
_value_line = lru_cache(maxsize=4096)(b"VA %d".__mod__)
_leased_line = lru_cache(maxsize=4096)(b"VA %d c".__mod__)


def version_of(lease: bytes) -> bytes:
    """Return the version number in ``lease``.

    ``lease`` is the number itself or the first line of an answer, such as ``VA 150 c1234``.
    """
    return lease.rpartition(b" c")[2].split(None, 1)[0]


def parse_answers(raw: bytes, count: int) -> list[Answer] | None:
    """Parse ``raw``, the answers to ``count`` commands. Return None if ``raw`` has only a part of
    these answers, because the others have not been received yet.

    :raises ProtocolError: an answer in ``raw`` is malformed, or ``raw`` has more than ``count``
        answers.
    """
    answers: list[Answer] = []
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
                # The error's message does not quote the answer, because the answer may contain
                # anything, such as data of a user.
                raise ProtocolError("not an answer of memcached")
            answers.append((line, None))
            position = end + 2
    if position < len(raw):
        raise ProtocolError("more than was asked for")
    return answers


def marked_sizes(raw: bytes, count: int) -> list[int] | None:
    """Parse the answers to the commands that append a line to ``count`` guards, if all succeeded.

    A guard is an entry that says whether other entries are valid.
    Each guard has three answers: it was created or existed already; the line was appended; the size
    of the guard. Return these sizes. Return None if an answer is missing or reports anything else.
    """
    lines = raw.split(b"\r\n")
    sizes = [line[4:] for line in lines[2::3] if line.startswith(b"HD s")]
    if (
        len(lines) != 3 * count + 1
        or lines[-1]
        or not _CREATED.issuperset(lines[:-1:3])
        or lines[1::3] != [b"HD"] * count
        or len(sizes) != count
        or not all(map(bytes.isdigit, sizes))
    ):
        return None
    return [*map(int, sizes)]


def parse_stats(raw: bytes) -> dict[str, Any] | None:
    if not raw.endswith(b"END\r\n"):
        return None
    pairs = re.findall(rb"STAT (\S+) (.*)\r\n", raw)
    if not pairs:
        raise ProtocolError("no statistics")
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, value in pairs}


# ##### The command get #####
#
# Both ``get`` and ``mg`` read entries. The server sends the answer to one ``get`` of many names in
# one part. It sends the answers to many ``mg`` commands in several parts, and each part wakes the
# client. So ``mg`` takes twice the time.


def get_packet(names: Sequence[str]) -> bytes:
    """Return the command that reads the entries of ``names``."""
    return f"get {' '.join(names)}\r\n".encode("ascii")


def parse_values(raw: bytes, names: Sequence[str]) -> list[bytes | None] | None:
    """Parse ``raw``, the answer to :func:`get_packet`. Return None if a part of the answer has not
    been received yet.

    The value of an entry that is missing or empty is None.

    :raises ProtocolError: the answer is malformed.
    """
    parts = raw.split(b"\r\n")
    end = len(parts) - 2
    if parts[-2:] == [b"END", b""]:
        # In the usual case all entries were found: the answer is a line and a value for each name.
        values = parts[1:-2:2]
        if (
            end == 2 * len(names)
            and all(values)
            and parts[:-2:2] == [*map(_named_value_line, names, map(len, values))]
        ):
            return [*values]
        # Otherwise, compare the lines with the names, one after the other. If the next line does
        # not belong to a name, the entry of this name is missing. But split() has cut a value in
        # two if it contains a line end. Then no later line matches, and ``position`` does not reach
        # ``end``. In this case, discard the result, and parse the answer by _parse_slowly().
        parts.append(b"")
        found: list[bytes | None] = []
        position = 0
        for name in names:
            value = parts[position + 1]
            if parts[position] == _named_value_line(name, len(value)):
                found.append(value or None)
                position += 2
                if position > end:
                    break
            else:
                found.append(None)
        if position == end:
            return found
    return _parse_slowly(raw, names)


@lru_cache(maxsize=8192)
def _named_value_line(name: str, size: int) -> bytes:
    return f"VALUE {name} 0 {size}".encode("ascii")


def _parse_slowly(raw: bytes, names: Sequence[str]) -> list[bytes | None] | None:
    found: dict[str, bytes] = {}
    position = 0
    while (end := raw.find(b"\r\n", position)) >= 0:
        line = raw[position:end]
        # SERVER_ERROR means that the server lacks the memory to send the other entries. They count
        # as missing.
        if line == b"END" or line.startswith(b"SERVER_ERROR"):
            if end + 2 < len(raw):
                raise ProtocolError("more than was asked for")
            return [found.get(name) or None for name in names]
        match line.split(b" "):
            case [b"VALUE", name, _, size] if size.isdigit():
                stop = end + 2 + int(size)
            case _:
                raise ProtocolError("not an answer of memcached")
        if len(raw) < stop + 2:
            return None
        if raw[stop : stop + 2] != b"\r\n":
            raise ProtocolError("a value of another size")
        found[name.decode("ascii", "replace")] = raw[end + 2 : stop]
        position = stop + 2
    return None
