"""memcached's command ``get``, which reads the entries of many names at once.

The server answers it in one part. It answers many ``mg`` commands in several parts, each of which
wakes the client, and takes twice the time for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from sharded_orm.cache.stores.sockets import ProtocolError


def get_packet(names: Sequence[str]) -> bytes:
    """Return the command that reads the entries of ``names``."""
    return f"get {' '.join(names)}\r\n".encode("ascii")


def get_values(raw: bytes, names: Sequence[str]) -> list[bytes | None] | None:
    """Parse ``raw``, the answer to :func:`get_packet`. Return None while parts are missing.

    The value of an entry that is missing or empty is None.

    :raises ProtocolError: the answer is malformed.
    """
    # If all entries were found, as usual, each is a line and a value.
    parts = raw.split(b"\r\n")
    values = parts[1:-2:2]
    if (
        len(parts) == 2 * len(names) + 2
        and parts[-2:] == [b"END", b""]
        and all(values)
        and parts[:-2:2] == [*map(_value_line, names, map(len, values))]
    ):
        return [*values]
    return _parsed(raw, names)


@lru_cache(maxsize=8192)
def _value_line(name: str, size: int) -> bytes:
    return f"VALUE {name} 0 {size}".encode("ascii")


def _parsed(raw: bytes, names: Sequence[str]) -> list[bytes | None] | None:
    found: dict[str, bytes] = {}
    position = 0
    while (end := raw.find(b"\r\n", position)) >= 0:
        line = raw[position:end]
        # The server has no memory left for the rest of the answer: the entries count as missing.
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
