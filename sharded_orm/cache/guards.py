"""The guard of a scope: what Yupoo's revision (Y15) has become. Pure.

A guard is a log of lines that is only appended to, except when it is compacted:

``=`` generation, salt, time
    The first line. Made by whoever finds the guard missing.
``+`` token, time, width, server, account, connection, pks
    A writer is about to commit what it wrote to these rows: an *open marker*.
``-`` token
    That transaction is over, and the objects of its rows were deleted.
``!`` token, salt
    The same, and whatever carries an earlier generation is void.

Appending needs no reading, so a writer marks in one round trip, and writers, readers and
those who repair do not wait for each other. Lines may arrive late, twice and in any order: a
marker is open while there is its ``+`` and neither ``-`` nor ``!`` anywhere in the log, and
the generation is a digest over that of the first line and the different ``!`` lines, so no
late line brings an earlier one back. Each line has a random token or salt, so the digest of a
guard never comes back either.

Compacting drops what is closed. A ``+`` that arrives even later than that opens its marker
again: readers bypass the cache, and nothing is stale, until the marker is repaired. Where it
is known that a ``+`` may still come (its ``-`` came first), compacting keeps the ``-``.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote, unquote

#: At most so many primary keys are listed by a marker; more are "all".
MAX_LISTED = 100
#: From this size (bytes) on a guard is compacted.
COMPACT_FROM = 2048
#: Closings whose marker has not come are kept up to this number, the latest ones.
_KEPT = 16
#: Larger guards are not remembered by :func:`parse`.
_REMEMBERED = 8192

# Nothing else is a line: what stands in a cache may come from anybody, and tokens of primary
# keys become names again.
_HEADER = re.compile(r"=([0-9a-f]{16}),[0-9a-f]{16},([0-9]{1,15})")
_OPENING = re.compile(
    r"\+([0-9A-Za-z]{1,32}),([0-9]{1,15}),([nw]),([0-9A-Za-z_.%~-]*),([0-9A-Za-z_.%~-]*)"
    r",([0-9]{1,20}),(\*|[0-9A-Za-z_.%~;]*)"
)
_CLOSING = re.compile(r"[-!]([0-9A-Za-z]{1,32}),([0-9a-f]{16})")


class BrokenGuard(ValueError):
    """What stands under the name of a guard is none."""


@dataclass(frozen=True, slots=True)
class Writer:
    """The database session of a transaction.

    :param server: identity of the database server, to compare by; empty if it has none.
    :param account: its account there, to compare by.
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
    :param early: tokens that were closed and whose marker has not come (yet).
    :param spare: bytes that compacting would save.
    """

    generation: str
    created: float
    open: tuple[Marker, ...]
    digest: str
    size: int
    early: tuple[str, ...] = ()
    spare: int = 0

    @property
    def is_bulky(self) -> bool:
        """Whether it is worth to be compacted."""
        return self.size > COMPACT_FROM and self.spare * 2 > self.size

    def covers(self, pk: str) -> bool:
        """Whether an open marker concerns the object ``pk``."""
        return any(marker.covers(pk) for marker in self.open)

    @property
    def has_wide(self) -> bool:
        """Whether an open marker concerns every narrower scope."""
        return any(marker.wide for marker in self.open)


# Tokens have to differ, nobody has to be unable to guess them; asking the system for each costs
# more than all else in a line.
_random = random.Random()
os.register_at_fork(after_in_child=_random.seed)


def new_token() -> str:
    """16 hexadecimal digits that were never there before. Thread-safe; differs after a fork."""
    return f"{_random.getrandbits(64):016x}"


def header(now: float) -> bytes:
    """The first line of a new guard."""
    return f"={new_token()},{new_token()},{round(now * 1000)}\n".encode()


def opening(marker: Marker) -> bytes:
    writer = marker.writer
    pks = "*" if marker.pks is None else ";".join(sorted(marker.pks))
    parts = (
        marker.token, str(round(marker.at * 1000)), "w" if marker.wide else "n",
        _quoted(writer.server), _quoted(writer.account), str(writer.connection), pks,
    )  # fmt: skip
    return f"+{','.join(parts)}\n".encode()


def closing(token: str, *, void: bool) -> bytes:
    """The line that ends the marker ``token``; with ``void`` it changes the generation."""
    if void:
        return f"!{token},{new_token()}\n".encode()
    # A salt: closed twice is not closed once.
    return f"-{token},{new_token()}\n".encode()


def parse(raw: bytes) -> Guard:
    """Read a guard.

    :raises BrokenGuard: it is none, or a line of it is damaged.
    """
    return _remembered(raw) if len(raw) <= _REMEMBERED else _parse(raw)


def _parse(raw: bytes) -> Guard:
    try:
        lines = raw.decode("ascii").split("\n")
    except UnicodeDecodeError as exc:
        raise BrokenGuard(raw[:40]) from exc
    first = _HEADER.fullmatch(lines[0])
    if first is None or lines.pop():
        raise BrokenGuard(raw[:40])
    opened: dict[str, re.Match[str]] = {}
    closed: dict[str, None] = {}
    salts: dict[str, None] = {}
    for line in lines[1:]:
        kind = line[:1]
        if kind == "+" and (found := _OPENING.fullmatch(line)):
            opened[found[1]] = found
        elif kind != "+" and (found := _CLOSING.fullmatch(line)):
            closed[found[1]] = None
            if kind == "!":
                salts[found[2]] = None
        else:
            raise BrokenGuard(raw[:40])
    generation = first[1]
    if salts:
        voided = f"{generation},{','.join(salts)}".encode()
        generation = hashlib.blake2b(voided, digest_size=8).hexdigest()
    early = tuple(token for token in closed if token not in opened)[-_KEPT:]
    still = [found for token, found in opened.items() if token not in closed]
    needed = len(lines[0]) + 1 + sum(len(found[0]) + 1 for found in still)
    needed += sum(len(token) + 19 for token in early)
    return Guard(
        generation,
        int(first[2]) / 1000,
        tuple(map(_marker, still)),
        digest(raw),
        len(raw),
        early,
        max(0, len(raw) - needed),
    )


def _marker(found: re.Match[str]) -> Marker:
    token, at, width, server, account, connection, pks = found.groups()
    try:
        writer = Writer(_unquoted(server), _unquoted(account), int(connection))
    except UnicodeDecodeError as exc:
        raise BrokenGuard(token) from exc
    listed = None if pks == "*" else frozenset(pks.split(";") if pks else ())
    return Marker(token, int(at) / 1000, width == "w", writer, listed)


_remembered = lru_cache(maxsize=4096)(_parse)


def compacted(guard: Guard) -> bytes:
    """The same guard without what is closed, and with another salt."""
    first = f"={guard.generation},{new_token()},{round(guard.created * 1000)}\n".encode()
    early = (closing(token, void=False) for token in guard.early)
    return b"".join([first, *map(opening, guard.open), *early])


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
    return "".join([guard.generation for guard in guards])


def revision(guards: Iterable[Guard]) -> str:
    """What stands in the name of a list: the digest of its own guard, the last one, and the
    generations of the wider ones."""
    *wider, own = guards
    return digest(own.digest, *(guard.generation for guard in wider))


@lru_cache(maxsize=256)
def _quoted(text: str) -> str:
    return quote(text, safe="")


def _unquoted(text: str) -> str:
    return unquote(text, errors="strict")
