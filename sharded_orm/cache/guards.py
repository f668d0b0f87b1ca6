"""Guards: the cache entry of each scope that changes with every write to its rows.

It is what Yupoo's revision (Y15) has become. Pure: no Django, no driver. A guard is a log of
lines. Writers only append to it; it is rewritten only to compact it:

``=`` generation, salt, time
    The first line, written by the reader or writer that finds the guard missing.
``+`` token, time, width, server, account, connection, pks
    A writer is about to commit what it wrote to these rows: an *open marker*.
``-`` token
    That transaction is over, and the objects of its rows were deleted.
``!`` token, salt
    The same, and all entries that carry an earlier generation are void.

Appending needs no reading, so a writer marks in one round trip, and writers, readers and
repairs do not wait for each other. Lines may arrive late, twice and in any order. A marker is
open while the log has its ``+``, and neither its ``-`` nor its ``!``. The generation is a digest
of the first line's generation and the different ``!`` lines, so no late line brings back an
earlier generation. Each line has a random token or salt, so the digest of a guard never comes
back either.

Compacting drops closed markers. A ``+`` that arrives after that opens its marker again: until
the marker is repaired, readers bypass the cache, and nothing is stale. If the ``-`` came before
its ``+``, which may still come, compacting keeps the ``-``.
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

#: A marker lists at most this many primary keys; for more it says "all".
MAX_LISTED = 100
#: Guards of more bytes are compacted.
COMPACT_FROM = 2048
#: Closings that came before their marker are kept up to this number, the latest ones.
_MAX_EARLY = 16
#: Guards of more bytes are not remembered by :func:`parse`.
_MAX_REMEMBERED = 8192

# Strict: anybody may have written to the cache, and tokens of primary keys become names again.
_HEADER = re.compile(r"=([0-9a-f]{16}),[0-9a-f]{16},([0-9]{1,15})")
_OPENING = re.compile(
    r"\+([0-9A-Za-z]{1,32}),([0-9]{1,15}),([nw]),([0-9A-Za-z_.%~-]*),([0-9A-Za-z_.%~-]*)"
    r",([0-9]{1,20}),(\*|[0-9A-Za-z_.%~;]*)"
)
_CLOSING = re.compile(r"[-!]([0-9A-Za-z]{1,32}),([0-9a-f]{16})")


class BrokenGuard(ValueError):
    """The entry under the name of a guard is no guard."""


@dataclass(frozen=True, slots=True)
class Writer:
    """The database session of a transaction.

    :param server: identity of the database server, for comparisons; empty if it has none.
    :param account: its account on that server, for comparisons.
    :param connection: id of the session on that server; 0 if it has none.
    """

    server: str = ""
    account: str = ""
    connection: int = 0


@dataclass(frozen=True, slots=True)
class Marker:
    """An announced write.

    :param at: seconds since 1970 on the writer's clock when it was made.
    :param wide: whether it may concern rows of every narrower scope.
    :param pks: tokens of the rows' primary keys, as :func:`~sharded_orm.cache.keys.token`
        gives them; None for all. Empty for new rows, which cannot have objects.
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
        """Whether closing it must change the generation, as it does not list its objects."""
        return self.pks is None or self.wide


@dataclass(frozen=True, slots=True)
class Guard:
    """A parsed guard.

    :param generation: objects and narrower revisions that carry another one are void.
    :param created: seconds since 1970 when it was created.
    :param open: markers of transactions that may commit at any time.
    :param digest: of all its bytes; the revision of lists.
    :param size: in bytes.
    :param early: tokens of closings whose marker has not come yet.
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
        """Whether compacting is worth its round trip."""
        return self.size > COMPACT_FROM and self.spare * 2 > self.size

    def covers(self, pk: str) -> bool:
        """Whether an open marker concerns the object ``pk``."""
        return any(marker.covers(pk) for marker in self.open)

    @property
    def has_wide(self) -> bool:
        """Whether an open marker concerns every narrower scope."""
        return any(marker.wide for marker in self.open)


# Tokens must differ, but may be guessed. Randomness of the system would cost more than all else
# in a line.
_random = random.Random()
os.register_at_fork(after_in_child=_random.seed)


def new_token() -> str:
    """16 hexadecimal digits that nobody else has. Thread-safe; different after a fork."""
    return f"{_random.getrandbits(64):016x}"


def header(now: float) -> bytes:
    """The first line of a new guard."""
    return f"={new_token()},{new_token()},{round(now * 1000)}\n".encode()


def opening(marker: Marker) -> bytes:
    """The line that opens ``marker``."""
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
    # The salt makes a second closing change the digest, too.
    return f"-{token},{new_token()}\n".encode()


def parse(raw: bytes) -> Guard:
    """The guard with the bytes ``raw``.

    :raises BrokenGuard: it is no guard, or a line is damaged.
    """
    return _remembered(raw) if len(raw) <= _MAX_REMEMBERED else _parse(raw)


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
        if kind == "+" and (match := _OPENING.fullmatch(line)):
            opened[match[1]] = match
        elif kind != "+" and (match := _CLOSING.fullmatch(line)):
            closed[match[1]] = None
            if kind == "!":
                salts[match[2]] = None
        else:
            raise BrokenGuard(raw[:40])
    generation = first[1]
    if salts:
        voided = f"{generation},{','.join(salts)}".encode()
        generation = hashlib.blake2b(voided, digest_size=8).hexdigest()
    early = tuple(token for token in closed if token not in opened)[-_MAX_EARLY:]
    still_open = [match for token, match in opened.items() if token not in closed]
    needed = len(lines[0]) + 1 + sum(len(match[0]) + 1 for match in still_open)
    needed += sum(len(token) + 19 for token in early)
    return Guard(
        generation,
        int(first[2]) / 1000,
        tuple(map(_marker, still_open)),
        digest(raw),
        len(raw),
        early,
        max(0, len(raw) - needed),
    )


def _marker(match: re.Match[str]) -> Marker:
    token, at, width, server, account, connection, pks = match.groups()
    try:
        writer = Writer(_unquoted(server), _unquoted(account), int(connection))
    except UnicodeDecodeError as exc:
        raise BrokenGuard(token) from exc
    listed = None if pks == "*" else frozenset(pks.split(";") if pks else ())
    return Marker(token, int(at) / 1000, width == "w", writer, listed)


_remembered = lru_cache(maxsize=4096)(_parse)


def compacted(guard: Guard) -> bytes:
    """The guard without its closed markers, and with another salt."""
    first = f"={guard.generation},{new_token()},{round(guard.created * 1000)}\n".encode()
    early = (closing(token, void=False) for token in guard.early)
    return b"".join([first, *map(opening, guard.open), *early])


def digest(*parts: bytes | str) -> str:
    """24 characters that stand for all of ``parts``."""
    hashed = hashlib.blake2b(digest_size=12)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        hashed.update(b"%d:" % len(raw))
        hashed.update(raw)
    return hashed.hexdigest()


def stamp(guards: Iterable[Guard]) -> str:
    """The stamp that a valid object carries: the generations of its guards, table's first."""
    return "".join([guard.generation for guard in guards])


def revision(guards: Iterable[Guard]) -> str:
    """The revision in the name of a valid list: a digest of its guards.

    :param guards: the widest first. The last one, the list's own, counts with its digest, the
        others with their generations.
    """
    *wider, own = guards
    return digest(own.digest, *(guard.generation for guard in wider))


@lru_cache(maxsize=256)
def _quoted(text: str) -> str:
    return quote(text, safe="")


def _unquoted(text: str) -> str:
    return unquote(text, errors="strict")
