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

#: Keys that match _PLAIN are stored as they are, others as a digest. Otherwise a collation of the
#: global database might treat two keys as equal, such as "alice" and "Alice".
_LONGEST_PLAIN = 64
_PLAIN = re.compile(rf"[a-z0-9_.:-]{{1,{_LONGEST_PLAIN}}}")


class StoredPlacement(NamedTuple):
    """A row of the directory: the shard of a key, and the number of the key's last move."""

    shard: int
    #: Whether this row of the directory is committed. If not, the open transaction, such as that of
    #: Django's ``TestCase``, may still roll it back.
    committed: bool
    #: The number of the last move of the key; 0 if the key has never moved.
    version: int = 0


class DirectoryStore(MoveStore, Protocol):
    """A store of placements. A placement is a shard key, as text, with the number of its shard.

    The implementation is in ``models/tables/directory.py``.
    """

    def find(self, group: str, keys: Iterable[str]) -> dict[str, StoredPlacement]:
        """Return the placements (shards) of ``keys``, keyed by key; keys without one are left out."""

    def place(self, group: str, placements: Mapping[str, int]) -> dict[str, StoredPlacement]:
        """Store the shard number in ``placements`` for each key that has no placement yet.

        A key that was placed before keeps its shard. The caller's transaction can neither hide nor
        roll back the placements.

        :return: the placements of all keys in ``placements``, in the form that :meth:`find`
            returns.
        """


class DirectoryStrategy(Strategy):
    """A strategy that places each new key on a random open shard, and looks up all other keys.

    The placements (the shards of keys) are stored in the directory, a table in the global database.

    - If a key has no placement, :meth:`locate` returns None and stores nothing.
    - A placement is committed before the key's first row is written, outside of the caller's
      transaction. So a rollback of the caller never moves a key that has rows. If two processes
      place the same key at once, the first insert wins, and both use its shard.
    - Each process remembers committed placements, at most as many as the option ``CACHE_SIZE`` says
      (100,000 by default), under a lease (:mod:`sharded_orm.routing.placement_lease`). A key that
      is moving to another shard is looked up each time.

    Cost: a remembered key costs no query. Up to 500 other keys cost one query. If some of them are
    new, placing them costs two more round trips. To renew the lease, each process sends two queries
    in ``PLACEMENT_LEASE`` seconds.
    """

    option_names = frozenset({"CACHE_SIZE"})
    places = True
    #: The store of placements (shards of keys), and the lease under which they are remembered.
    #: ``runtime`` sets both.
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
        # Use the dict without a lock. Single operations of a dict are atomic, and a fork could copy
        # a lock while it is held.
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
        texts = {self.entry(key): key for key in keys}
        if not texts:
            return {}
        poll = self.lease.current()
        placements: dict[str, KnownPlacement] = {}
        for text in texts:
            known = self._remembered(text, poll)
            if known is not None:
                placements[text] = known
        for text, known in placements.items():
            self._use(text, known)
        missing = [text for text in texts if text not in placements]
        if missing:
            placements |= self._look_up(missing, poll)
        return {key: self._number(placements, text) for text, key in texts.items()}

    def place_many(self, keys: Iterable[Any]) -> dict[Any, int]:
        numbers = self.locate_many(keys)
        placed = {key: number for key, number in numbers.items() if number is not None}
        return placed | self.place_new(key for key in numbers if key not in placed)

    def place_new(self, keys: Iterable[Any]) -> dict[Any, int]:
        keys_by_text = {self.entry(key): key for key in keys}
        if not keys_by_text:
            return {}
        drawn = {text: self.draw() for text in keys_by_text}
        poll = self.lease.current()
        placed = self._remember(self.store.place(self.group.name, drawn), poll)
        return {keys_by_text[text]: known.shard for text, known in placed.items()}

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
            # A queryset is being built in an event loop, where no query may be sent. So use only
            # what this process remembers. The shard is looked up again when another thread
            # evaluates the queryset.
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
        """Make this process forget the shard of ``key``.

        Call this after the directory's table was changed by hand. After a move by ``manage.py keys
        move``, no call is needed.

        :param key: a shard key. With None, the default, the process forgets the shards of all keys.
        """
        if key is None:
            self._placements.clear()
        else:
            self._placements.pop(self.entry(key), None)

    def succeed(self, former: Strategy) -> None:
        # Keep the remembered placements, which do not depend on the topology. The dict is shared
        # with the strategy ``former``, which other threads may still use: a placement that one
        # forgets is forgotten by both.
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
        """Whether all keys have stayed on the same shards since ``placements`` were looked up.

        Sends no query for a key if the lease (the right to remember shards) shows that it has not
        moved. Other keys are looked up again. A key that has moved away and come back counts as
        moved, because its number of moves has changed.
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
        """Look up the placements (shards) of keys in the directory, the table of keys.

        :param poll: the last poll (the query for moving keys) before this look-up. The placements
            are recorded with this poll even if a newer poll arrives during the look-up, because
            they may be older than the newer poll.
        """
        return self._remember(self.store.find(self.group.name, texts), poll)

    def _remember(
        self, stored: Mapping[str, StoredPlacement], poll: Poll | None
    ) -> dict[str, KnownPlacement]:
        # Invariant: _placements contains only committed placements. An uncommitted placement may be
        # rolled back with the caller's transaction; then its key would have no shard.
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
        """Record that the current operation relies on the placement (the shard) of a key.

        If a transaction is open, the transaction records the placement, too.
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
        """Return the text under which the directory stores ``key``. Equal keys have equal texts.

        The key's type does not matter: the integer 7 and the text "7" have the same text.

        :raises InvalidShardKey: the value of ``key`` cannot be a shard key.
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
    """Whether an :meth:`~DirectoryStrategy.entry` is a digest, from which the key cannot be read."""
    return entry.startswith("#")


def _refuses_queries() -> bool:
    """Whether Django refuses queries in this thread, because an event loop runs in it.

    If DJANGO_ALLOW_ASYNC_UNSAFE is set in the environment, Django permits queries all the same.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return not os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE")
