"""The directory strategy: a table in the global database stores the shard of each key (Yupoo, Y2)."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any, NamedTuple, Protocol

from sharded_orm.exceptions import InvalidConfiguration
from sharded_orm.routing.base import Strategy, exact_text, utf8_bytes
from sharded_orm.routing.placement_lease import MoveStore, PermanentLease, PlacementLease, Poll
from sharded_orm.routing.placement_uses import KnownPlacement, current_uses
from sharded_orm.routing.transaction_uses import check_use
from sharded_orm.topology.model import ShardGroup

#: A key that matches _PLAIN is stored as it is. Any other key, such as "Alice", is stored as a
#: digest, because a collation of the global database might treat "alice" and "Alice" as equal.
_LONGEST_PLAIN = 64
_PLAIN = re.compile(rf"[a-z0-9_.:-]{{1,{_LONGEST_PLAIN}}}")


class StoredPlacement(NamedTuple):
    """The shard of one key, as it is stored in the directory."""

    shard: int
    #: Whether the row is committed. If it is not, its transaction may be rolled back, and then the
    #: key has no shard again. For example, Django's ``TestCase`` rolls back its transaction.
    committed: bool
    #: The number of the last move of the key; 0 if the key has never moved. If the number changes,
    #: a process knows that the key has moved meanwhile.
    version: int = 0


class DirectoryStore(MoveStore, Protocol):
    """Stores the placement of each shard key, that is, the number of its shard. Keys are texts.

    The implementation is in ``models/tables/directory.py``.
    """

    def find(self, group: str, keys: Iterable[str]) -> dict[str, StoredPlacement]:
        """Return a dict that maps each of ``keys`` that has a placement to this placement."""

    def place(self, group: str, placements: Mapping[str, int]) -> dict[str, StoredPlacement]:
        """Store the shard of each key that has no shard yet. Other keys keep their shard.

        The rows are stored outside of the caller's transaction, so they stay if that is rolled
        back. Inside Django's ``TestCase``, however, they belong to the caller's transaction.

        :param placements: maps each key to the number of the shard that it gets.
        :return: a dict that maps each key in ``placements`` to its placement. If a key had a shard
            before the call, this is the shard in the result.
        """


class DirectoryStrategy(Strategy):
    """A strategy that places each new key on a random open shard, and looks up all other keys.

    The directory is a table, usually in the global database. It has one row for each key with the
    number of its shard, the *placement* of the key.

    - If a key has no placement, :meth:`locate` returns None and stores nothing.
    - The placement of a new key is committed before the key's first row is written, outside of the
      caller's transaction. So a rollback of that transaction does not remove it: others may have
      written rows of the key by then. If two processes place the same key at the same time, the
      first insert wins, and both use its shard.
    - Each process remembers up to 100,000 committed placements (option ``CACHE_SIZE``). It may use
      them as long as it has a lease (:mod:`sharded_orm.routing.placement_lease`). A key that is
      moving to another shard is looked up each time.

    Cost: a remembered key costs no query. Up to 500 other keys cost one query together. If some of
    them are new, placing them costs two more round trips. To renew the lease, each process sends
    two queries in ``PLACEMENT_LEASE`` seconds.
    """

    option_names = frozenset({"CACHE_SIZE"})
    places = True
    #: ``store`` reads and writes the directory. ``lease`` says whether this process may use the
    #: placements that it remembers. ``runtime`` sets both.
    store: DirectoryStore
    lease: PlacementLease | PermanentLease

    def __init__(self, group: ShardGroup, options: Mapping[str, Any]) -> None:
        super().__init__(group, options)
        size = options.get("CACHE_SIZE", 100_000)
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise InvalidConfiguration(
                [f"group {group.name!r}: CACHE_SIZE must be 0 or more, not {size!r}"]
            )
        self._cache_size = size
        # This dict needs no lock, because each use is a single operation, which is atomic. A lock
        # would be dangerous: if a process forks while a thread holds it, it stays locked in the
        # child.
        self._placements: OrderedDict[str, KnownPlacement] = OrderedDict()

    @property
    def moves_keys(self) -> bool:
        return self.lease.seconds is not None

    def locate(self, key: Any) -> int | None:
        text = self.entry(key)
        poll = self.lease.current()
        known = self._remembered(text, poll)
        if known is None:
            return self._number(self._look_up([text], poll), text)
        self._use(text, known)
        return known.shard

    def locate_many(self, keys: Iterable[Any]) -> dict[Any, int | None]:
        texts = {key: self.entry(key) for key in keys}
        if not texts:
            return {}
        poll = self.lease.current()
        placements: dict[str, KnownPlacement] = {}
        missing: list[str] = []
        # Several keys may have the same text, such as 7 and "7".
        for text in dict.fromkeys(texts.values()):
            known = self._remembered(text, poll)
            if known is None:
                missing.append(text)
            else:
                placements[text] = known
                self._use(text, known)
        if missing:
            placements |= self._look_up(missing, poll)
        return {key: self._number(placements, text) for key, text in texts.items()}

    def place_many(self, keys: Iterable[Any]) -> dict[Any, int]:
        numbers = self.locate_many(keys)
        placed = {key: number for key, number in numbers.items() if number is not None}
        return placed | self.place_new(key for key in numbers if key not in placed)

    def place_new(self, keys: Iterable[Any]) -> dict[Any, int]:
        texts = {key: self.entry(key) for key in keys}
        if not texts:
            return {}
        drawn = {text: self.draw() for text in dict.fromkeys(texts.values())}
        poll = self.lease.current()
        placed = self._remember(self.store.place(self.group.name, drawn), poll)
        return {key: placed[text].shard for key, text in texts.items()}

    def moved_to(self, key: Any) -> int | None:
        known = self._moved(key)
        return None if known is None else known.shard

    def version(self, key: Any) -> int:
        known = self._moved(key)
        return 0 if known is None else known.version

    def has_moved_keys(self) -> bool:
        if _refuses_queries():
            return False
        poll = self.lease.current()
        return not self.lease.is_suspended if poll is None else poll.moves.last > 0

    def _moved(self, key: Any) -> KnownPlacement | None:
        text = self.entry(key)
        if _refuses_queries():
            # A queryset is being built in an event loop, where Django refuses queries. So use only
            # what this process remembers. When another thread evaluates the queryset, the shard is
            # looked up again.
            known = self._remembered(text, self.lease.valid())
            return known if known is not None and known.version else None
        poll = self.lease.current()
        if poll is None and self.lease.is_suspended:
            return None
        known = self._remembered(text, poll)
        uses = current_uses()
        if known is None and uses is not None:
            known = uses.placement(self, text)
        if known is None:
            known = self._look_up([text], poll).get(text)
        else:
            self._use(text, known)
        return known if known is not None and known.version else None

    def forget(self, key: Any | None = None) -> None:
        """Make this process forget the shard of ``key``, so that it looks the key up again.

        Call this after somebody has changed the directory's table by hand. After ``manage.py keys
        move``, no call is needed.

        :param key: a shard key. With None, the default, the process forgets the shards of all keys.
        """
        if key is None:
            self._placements.clear()
        else:
            self._placements.pop(self.entry(key), None)

    def succeed(self, former: Strategy) -> None:
        # A new topology does not change placements, so go on with those that ``former`` remembers.
        # Use the same dict, because other threads may still use ``former``. So what one strategy
        # forgets, the other forgets, too.
        if (
            isinstance(former, DirectoryStrategy)
            and type(former) is type(self)
            and dict(former.options) == dict(self.options)
        ):
            self._placements = former._placements

    def explain(self, key: Any) -> str:
        number = self.locate(key)
        if number is None:
            return f"the directory has no placement of {key!r}: no rows exist"
        return f"the directory places {key!r} on shard {number}"

    def holds(self, placements: Mapping[str, KnownPlacement]) -> bool:
        """Return whether no key in ``placements`` has moved since it was looked up.

        While this process has a lease (the right to remember the shards of keys), it knows which
        keys were moving. A key that was not moving needs no query. All other keys are looked up
        again. A key that has moved away and come back counts as moved, because the number of its
        last move is different.

        :param placements: maps keys, as text, to the placements that an operation has used.
        """
        poll, name = self.lease.valid(), self.group.name
        uncovered = [
            text
            for text, known in placements.items()
            if poll is None or not poll.covers(name, text, known.poll)
        ]
        if not uncovered:
            return True
        stored = self.store.find(name, uncovered)
        return all(
            text in stored and (stored[text].shard, stored[text].version) == placements[text][:2]
            for text in uncovered
        )

    def _remembered(self, text: str, poll: Poll | None) -> KnownPlacement | None:
        known = self._placements.get(text)
        if known is None or poll is None or not poll.covers(self.group.name, text, known.poll):
            return None
        return known

    def _look_up(self, texts: list[str], poll: Poll | None) -> dict[str, KnownPlacement]:
        """Look up keys in the directory, and remember their placements.

        :param poll: the last poll before this look-up. A poll is a query that asks which keys are
            moving. The placements are remembered with the number of this poll, even if another
            thread has sent a newer poll meanwhile, because the newer poll may report a move that
            began after the placements were read.
        """
        return self._remember(self.store.find(self.group.name, texts), poll)

    def _remember(
        self, stored: Mapping[str, StoredPlacement], poll: Poll | None
    ) -> dict[str, KnownPlacement]:
        # Remember only committed placements. One that is not committed may be rolled back with the
        # caller's transaction. Then this process would write rows of a key that has no shard.
        placements = {}
        for text, (shard, committed, version) in stored.items():
            known = KnownPlacement(shard, version, 0 if poll is None else poll.number)
            placements[text] = known
            if not committed:
                continue
            self._use(text, known)
            if poll is not None and self._cache_size:
                self._placements[text] = known
        while len(self._placements) > self._cache_size:
            with suppress(KeyError):  # Ignore the error: another thread may have emptied the dict.
                self._placements.popitem(last=False)
        return placements

    def _use(self, text: str, known: KnownPlacement) -> None:
        """Record that the current operation uses the shard of a key.

        At the end of the operation, the library checks whether the key has moved meanwhile.

        :raises KeyMoved: the key has moved, or may have moved, since the open transaction began.
        """
        if (uses := current_uses()) is not None:
            uses.record(self, text, known)
        if self.moves_keys:
            check_use(self, text, known)

    @staticmethod
    def _number(placements: Mapping[str, KnownPlacement], text: str) -> int | None:
        known = placements.get(text)
        return None if known is None else known.shard

    def entry(self, key: Any) -> str:
        """Return the text under which the directory stores ``key``.

        The type of the key does not matter: the integer 7 and the text "7" are stored under the
        same text. For some keys, the text is a digest; see :func:`is_digest`.

        :raises InvalidShardKey: ``key`` cannot be a shard key, for example because it is a float.
        """
        if isinstance(key, str):
            text = exact_text(key, self)
        elif isinstance(key, int) and not isinstance(key, bool):
            text = str(int(key))
            if len(text) <= _LONGEST_PLAIN:
                return text
        elif isinstance(key, uuid.UUID):
            text = key.hex
        elif isinstance(key, Decimal) and key == key.to_integral_value():
            text = str(int(key))
        else:
            raise self.invalid(key, "integers, text and UUIDs")
        if _PLAIN.fullmatch(text):
            return text
        return f"#{hashlib.sha256(utf8_bytes(text, self)).hexdigest()}"


def is_digest(entry: str) -> bool:
    """Return whether a text from :meth:`DirectoryStrategy.entry` is a digest (a hash) of the key.

    The key cannot be read from a digest.
    """
    return entry.startswith("#")


def _refuses_queries() -> bool:
    """Return whether Django refuses queries in this thread, because an event loop runs in it.

    If the environment variable DJANGO_ALLOW_ASYNC_UNSAFE is set, Django permits them.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return not os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE")
