"""The guard of a scope: what Yupoo's revision (Y15) has become. Pure.

A guard is a log of lines that is only appended to, except when it is compacted:

``=`` generation, salt, time
    The first line. Made by whoever finds the guard missing.
``+`` token, time, width, server, account, connection, pks
    A writer is about to commit what it wrote to these rows: an *open marker*.
``-`` token
    That transaction is over, and the objects of its rows were deleted.
``!`` token, generation
    The same, and whatever carries an earlier generation is void.

Appending needs no reading, so a writer marks in one round trip, and writers, readers and
those who repair do not wait for each other. Lines may arrive late and twice: a marker is
open while there is its ``+`` and neither ``-`` nor ``!`` anywhere in the log. Each line
has a random token, so the digest of a guard never comes back.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

#: At most so many primary keys are listed by a marker; more are "all".
MAX_LISTED = 100
#: From this size (bytes) on a guard is compacted.
COMPACT_FROM = 2048


class BrokenGuard(ValueError):
    """What stands under the name of a guard is none."""


@dataclass(frozen=True, slots=True)
class Writer:
    """The database session of a transaction.

    :param server: identity of the database server; empty if it has none.
    :param account: the database user as the server knows it.
    :param connection: id of the session on that server; 0 if it has none.
    """

    server: str = ""
    account: str = ""
    connection: int = 0


@dataclass(frozen=True, slots=True)
class Marker:
    """An announced write.

    :param at: when, in seconds since 1970, on the writer's clock.
    :param wide: it may concern rows of every narrower scope.
    :param pks: tokens of the rows' primary keys, as :func:`~sharded_orm.cache.keys.token`
        gives them; None for all. Empty when no object can exist (new rows).
    """

    token: str
    at: float
    wide: bool
    writer: Writer
    pks: frozenset[str] | None

    def covers(self, pk: str) -> bool:
        return self.pks is None or pk in self.pks

    @property
    def voids(self) -> bool:
        """Whether closing it must change the generation: its objects are not listed."""
        return self.pks is None or self.wide


@dataclass(frozen=True, slots=True)
class Guard:
    """A guard as it was read.

    :param generation: objects and narrower revisions that carry another one are void.
    :param created: when, in seconds since 1970.
    :param open: markers of transactions that may commit at any time.
    :param digest: of the whole; the revision of lists.
    """

    generation: str
    created: float
    open: tuple[Marker, ...]
    digest: str
    size: int

    def is_quarantined(self, now: float, seconds: float) -> bool:
        """Whether it is so young that a marker may have been lost with its predecessor."""
        return now < self.created + seconds

    def covers(self, pk: str) -> bool:
        """Whether an open marker concerns the object ``pk``."""
        return any(marker.covers(pk) for marker in self.open)

    @property
    def has_wide(self) -> bool:
        """Whether an open marker concerns every narrower scope."""
        return any(marker.wide for marker in self.open)


def new_token() -> str:
    return secrets.token_hex(8)


def header(now: float) -> bytes:
    """The first line of a new guard."""
    return b"=%s,%s,%d\n" % (new_token().encode(), new_token().encode(), now * 1000)


def opening(marker: Marker) -> bytes:
    writer = marker.writer
    pks = "*" if marker.pks is None else ";".join(sorted(marker.pks))
    parts = (
        marker.token, str(int(marker.at * 1000)), "w" if marker.wide else "n",
        _quoted(writer.server), _quoted(writer.account), str(writer.connection), pks,
    )  # fmt: skip
    return f"+{','.join(parts)}\n".encode()


def closing(token: str, *, void: bool) -> bytes:
    """The line that ends the marker ``token``; with ``void`` it changes the generation."""
    if void:
        return f"!{token},{new_token()}\n".encode()
    # A salt: closed twice is not closed once.
    return f"-{token},{new_token()}\n".encode()


@lru_cache(maxsize=4096)
def parse(raw: bytes) -> Guard:
    """Read a guard.

    :raises BrokenGuard: it is none, or a line of it is damaged.
    """
    generation, created = "", 0.0
    opened: dict[str, Marker] = {}
    closed: set[str] = set()
    try:
        lines = raw.decode("ascii").split("\n")
        if lines.pop() or not lines or lines[0][:1] != "=":
            raise BrokenGuard(raw[:40])
        for line in lines:
            kind, fields = line[:1], line[1:].split(",")
            if kind == "+":
                token, at, width, server, account, connection, pks = fields
                opened[token] = Marker(
                    token,
                    int(at) / 1000,
                    {"w": True, "n": False}[width],
                    Writer(_unquoted(server), _unquoted(account), int(connection)),
                    None if pks == "*" else frozenset(pks.split(";") if pks else ()),
                )
            elif kind == "-":
                token, _ = fields
                closed.add(token)
            elif kind == "!":
                token, generation = fields
                closed.add(token)
            elif kind == "=" and not generation:
                generation, _, at = fields
                created = int(at) / 1000
            else:
                raise BrokenGuard(raw[:40])
    except (ValueError, KeyError) as exc:
        raise BrokenGuard(raw[:40]) from exc
    return Guard(
        generation,
        created,
        tuple(marker for token, marker in opened.items() if token not in closed),
        digest(raw),
        len(raw),
    )


def compacted(guard: Guard) -> bytes:
    """The same guard without what is closed, and with another salt."""
    first = f"={guard.generation},{new_token()},{int(guard.created * 1000)}\n".encode()
    return first + b"".join(map(opening, guard.open))


def digest(*parts: bytes | str) -> str:
    """24 characters that stand for all of ``parts``."""
    made = hashlib.blake2b(digest_size=12)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        made.update(b"%d:" % len(raw))
        made.update(raw)
    return made.hexdigest()


def stamp(guards: Iterable[Guard]) -> str:
    """What an object must carry: the generations of its guards, from the table's to the key's."""
    return "".join(guard.generation for guard in guards)


def revision(guards: Iterable[Guard]) -> str:
    """What stands in the name of a list: the digest of its own guard, the last one, and the
    generations of the wider ones."""
    *wider, own = guards
    return digest(own.digest, *(guard.generation for guard in wider))


def _quoted(text: str) -> str:
    return text.encode().hex()


def _unquoted(text: str) -> str:
    return bytes.fromhex(text).decode()
