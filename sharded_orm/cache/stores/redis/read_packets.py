"""The packets that read entries from a Redis server, and the answers that a reader expects.

This module makes the bytes itself, because hiredis would take twice as long. A row with its two
guards is the most frequent read, so its packet and its answer are made in one step.
"""

from __future__ import annotations

from collections.abc import Sequence

from sharded_orm.cache.stores.redis.login import LENGTH, OWNER

# The end of each packet: it reads the entry OWNER last.
_READ_OWNER = f"${len(OWNER)}\r\n{OWNER.decode()}\r\n"
# The length of what is put before each name: the incarnation and a colon.
_PREFIX_LENGTH = LENGTH + 1


def read_packet(names: Sequence[str], owner: bytes) -> bytes:
    """Return the command that reads entries, and the entry :data:`OWNER` after them.

    :param names: the names of the entries, printable ASCII.
    :param owner: the value of the entry :data:`OWNER`. It ends with the incarnation, the random
        word before all names of entries.
    """
    word = owner[-LENGTH:].decode()
    if len(names) == 3:
        a, b, c = names
        return (
            f"*5\r\n$4\r\nMGET\r\n${_PREFIX_LENGTH + len(a)}\r\n{word}:{a}\r\n"
            f"${_PREFIX_LENGTH + len(b)}\r\n{word}:{b}\r\n${_PREFIX_LENGTH + len(c)}\r\n{word}:{c}\r\n"
            f"{_READ_OWNER}"
        ).encode("ascii")
    parts = [f"${_PREFIX_LENGTH + len(name)}\r\n{word}:{name}\r\n" for name in names]
    return f"*{len(parts) + 2}\r\n$4\r\nMGET\r\n{''.join(parts)}{_READ_OWNER}".encode("ascii")


def is_answer(answer: bytes, values: Sequence[bytes], owner: bytes) -> bool:
    """Whether ``answer`` is the whole answer to :func:`read_packet`, and has these values.

    Takes less time than parsing the answer.

    :param values: the values of the entries, one for each name in the packet.
    :param owner: the value of the entry :data:`OWNER` that the packet was made for.
    """
    if len(values) == 3:
        a, b, c = values
        return answer == b"*4\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (
            len(a), a, len(b), b, len(c), c, len(owner), owner,
        )  # fmt: skip
    parts = [b"$%d\r\n%b\r\n" % (len(value), value) for value in (*values, owner)]
    return answer == b"*%d\r\n%b" % (len(parts), b"".join(parts))
