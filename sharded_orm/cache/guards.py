"""Guards: cache entries that say whether other entries are still valid.

A *scope* is a set of rows of one table on a shard: all rows, the rows of one shard key, or those of
one isolate key (a value of the field that divides the rows of a shard key). Each scope has one
guard, an entry that changes with every write to the rows of the scope. Guards are a further
development of Yupoo's revision (Y15). This module uses neither Django nor a driver.

A guard is a log of text lines. Writers only append lines. A guard is rewritten only to make it
shorter. The first character says what a line means:

``=`` generation, salt, time
    The first line, written by the reader or writer that found the guard missing.
``+`` token, time, width, server, account, connection, pks
    An *open marker*: a transaction wrote the rows ``pks``, and is about to commit. The token
    identifies the marker.
``-`` token, salt
    The marker with this token is closed: its transaction is over, and the rows that the transaction
    wrote were deleted from the cache.
``!`` token, salt
    The marker is closed, and the guard gets a new *generation*: all entries that carry an
    earlier generation of this guard are void.

Appending needs no reading. So a writer adds its marker in one round trip, and writers, readers
and repairs do not wait for each other. Lines may arrive late, twice and in any order. A marker is
open while the log has a ``+`` line, but neither a ``-`` nor a ``!`` line, with the marker's token.
The generation is a digest of the first line's generation and the salts of all ``!`` lines, so no
late line brings back an earlier generation. Each line has a random token or salt, so a guard never
has the same digest a second time.

To *compact* a guard is to rewrite it without its closed markers. If the ``+`` line of a dropped
marker arrives again, the marker is open again. Readers then bypass the cache until the marker is
repaired, so no reader gets stale rows. If the log has a ``-`` line without its ``+`` line, the
``+`` line may still arrive, so the ``-`` line is kept.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote, unquote

#: A marker (the announcement of a write) lists at most this many primary keys. For a write to more
#: rows, the marker announces all rows of the guard.
MAX_LISTED = 100
#: A guard with more bytes may be compacted: rewritten without the markers (announcements) of writes
#: that are over.
COMPACT_FROM = 2048
#: A line that closes a marker (the announcement of a write) may arrive before the line that opens
#: the marker. When a guard is compacted, such closing lines are kept, but at most this many of
#: them, the latest. If the closing line were dropped, the late opening line would open the marker
#: of a write that is over.
_MAX_EARLY = 16
#: :func:`parse` remembers the parsed form of a guard up to this size in bytes.
_MAX_REMEMBERED = 8192

# The patterns of a guard's lines. They are strict, because other programs can write to the cache
# server, and because the tokens of primary keys in a guard become parts of entry names.
_HEADER = re.compile(r"=([0-9a-f]{16}),[0-9a-f]{16},([0-9]{1,15})")
_OPENING = re.compile(
    r"\+([0-9A-Za-z]{1,32}),([0-9]{1,15}),([nw]),([0-9A-Za-z_.%~-]*),([0-9A-Za-z_.%~-]*)"
    r",([0-9]{1,20}),(\*|[0-9A-Za-z_.%~;]*)"
)
_CLOSING = re.compile(r"[-!]([0-9A-Za-z]{1,32}),([0-9a-f]{16})")


class BrokenGuard(ValueError):
    """The bytes of a guard are damaged, or something else was stored under its name.

    A guard is the entry that says whether other entries are valid.
    """


class Writer(NamedTuple):
    """The database session of a transaction that has written rows.

    :param server: identifies the database server, to find out whether two sessions are on the same
        server; empty (the default) if the server has no identity.
    :param account: identifies the database account of the session.
    :param connection: the id of the session on the server; 0 (the default) if it has no id.
    """

    server: str = ""
    account: str = ""
    connection: int = 0


class Marker(NamedTuple):
    """A marker: the announcement of a write that may be committed at any time.

    :param token: identifies the marker.
    :param at: when the write was announced, by the writer's clock, in seconds since 1970.
    :param wide: whether the write may concern the rows of every isolate key (a value of the field
        that divides the rows of a shard key). True if the isolate keys of the written rows are not
        known, or are too many. Then no markers are added to the guards of the isolate keys.
    :param writer: the database session of the transaction.
    :param pks: tokens (:func:`~sharded_orm.cache.keys.token`) of the primary keys of the written
        rows; None for all rows of the guard. New rows are left out, because no object (cached row)
        of them can exist.
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
        """Whether all entries of the guard become void when the marker (announcement of a write) is
        closed.

        True if the marker does not list the written rows and their isolate keys one by one. The
        line that closes the marker then gives the guard a new generation, a random digest.
        """
        return self.pks is None or self.wide


class Guard(NamedTuple):
    """A parsed guard: the cache entry that says whether the objects and lists of a set of rows are
    valid.

    :param generation: a random digest. When it changes, all objects that were stored before become
        void. Lists of narrower sets of rows become void, too, because their names depend on it. For
        example, the guard of a shard key makes the lists of its isolate keys void.
    :param created: when the guard was created, in seconds since 1970.
    :param open: the open markers: the announcements of writes that may be committed at any time.
    :param digest: a digest of all bytes of the guard, from which the names of its lists are made.
    :param size: the size of the guard in bytes.
    :param early: tokens of markers whose closing line has arrived, but whose opening line has not;
        the latest 16 at most. Default: none.
    :param spare: how many bytes compacting would save. Default: 0.
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
        """Whether compacting the guard is worth a round trip.

        True if the guard is large, and if more than half of it are markers of writes that are over,
        which compacting drops.
        """
        return self.size > COMPACT_FROM and self.spare * 2 > self.size

    def covers(self, pk: str) -> bool:
        """Whether an unfinished write may change the row whose primary key has the token ``pk``."""
        return any(marker.covers(pk) for marker in self.open)

    @property
    def has_wide(self) -> bool:
        """Whether an unfinished write may concern every isolate key.

        An isolate key is a value of the field that divides the rows of a shard key.
        """
        return any(marker.wide for marker in self.open)


# Python's generator is good enough for tokens, because nobody gains anything by guessing them. The
# operating system's generator would take longer than all other work for an announcement.
_random = random.Random()
os.register_at_fork(after_in_child=_random.seed)


def new_token() -> str:
    """Return a random token of 16 hexadecimal digits, unique in practice. Thread-safe, and safe
    after a fork.
    """
    return f"{_random.getrandbits(64):016x}"


def header(now: float) -> bytes:
    """Return the first line of a new guard, the entry that says whether other entries are valid.

    :param now: the time in seconds since 1970.
    """
    return f"={new_token()},{new_token()},{round(now * 1000)}\n".encode()


def opening(marker: Marker) -> bytes:
    """Return the line that opens ``marker`` in a guard: it announces a write."""
    token, at, wide, writer, pks = marker
    listed = "*" if pks is None else ";".join(sorted(pks))
    return (
        f"+{token},{round(at * 1000)},{'w' if wide else 'n'},{_text_of(writer)},{listed}\n".encode()
    )


def closing(token: str, *, void: bool) -> bytes:
    """Return the line that closes the marker with ``token`` in a guard: the announced write is
    over.

    :param void: whether the line also gives the guard a new generation (a random digest), so that
        all earlier entries become void.
    """
    if void:
        return f"!{token},{new_token()}\n".encode()
    # Add a random text, so that even a second closing line for the same write changes the digest of
    # the guard.
    return f"-{token},{new_token()}\n".encode()


def parse(raw: bytes) -> Guard:
    """Parse the bytes of a guard, the entry that says whether other entries are valid.

    :raises BrokenGuard: ``raw`` is not a guard, or one of its lines is damaged.
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
    early = tuple([token for token in closed if token not in opened])[-_MAX_EARLY:]
    still_open = [match for token, match in opened.items() if token not in closed]
    needed = len(lines[0]) + 1
    for match in still_open:
        needed += len(match[0]) + 1
    for token in early:
        needed += len(token) + 19
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
    """Return a shorter form of ``guard``, without the markers (announcements) of writes that are
    over.

    The markers of unfinished writes stay. The generation stays, too, so objects that were stored
    before remain valid. A new random salt gives the guard a digest that it never had before.
    """
    first = f"={guard.generation},{new_token()},{round(guard.created * 1000)}\n".encode()
    early = (closing(token, void=False) for token in guard.early)
    return b"".join([first, *map(opening, guard.open), *early])


def digest(*parts: bytes | str) -> str:
    """Return a digest of ``parts``, 24 hexadecimal characters."""
    hashed = hashlib.blake2b(digest_size=12)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        hashed.update(b"%d:" % len(raw))
        hashed.update(raw)
    return hashed.hexdigest()


def stamp(guards: Iterable[Guard]) -> str:
    """Return the stamp of objects: the generations of their ``guards``, joined. An object with
    another stamp is void.

    A guard gets a new generation (a random digest) after a write that may concern any of its rows.
    This makes all its earlier objects void.

    :param guards: the guard of the table, then the guard of the object's shard key. For a global
        model, only the guard of the table.
    """
    return "".join([guard.generation for guard in guards])


def revision(guards: Iterable[Guard]) -> str:
    """Return the revision of cached lists: a digest of their guards, which is part of the lists'
    names.

    A write that may change the lists changes the revision. Readers then look for other names, so
    they no longer find the old lists.

    :param guards: the guards of all sets of rows that contain the rows of the lists, from the
        widest set to the narrowest. For example, the guards of a table, of a shard key and of an
        isolate key. Any change of the last guard changes the revision. A change of another guard
        changes the revision only if this guard gets a new generation (a random digest), which is so
        after a write that may concern any of its rows.
    """
    *wider, own = guards
    return digest(own.digest, *(guard.generation for guard in wider))


@lru_cache(maxsize=256)
def _text_of(writer: Writer) -> str:
    server, account = quote(writer.server, safe=""), quote(writer.account, safe="")
    return f"{server},{account},{writer.connection}"


def _unquoted(text: str) -> str:
    return unquote(text, errors="strict")
