"""The directory strategy: a table in the global database stores the shard of each key (Yupoo, Y2)."""

from __future__ import annotations

import hashlib
import re
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, Protocol

from sharded_orm.exceptions import InvalidConfiguration
from sharded_orm.routing.base import Strategy, exact_text, utf8_bytes
from sharded_orm.topology.model import ShardGroup

#: A pattern for the keys that the directory stores unchanged. The directory stores a digest of
#: every other key, so that no collation of the global database confuses two keys, such as "alice"
#: and "Alice", or keys that differ by trailing spaces.
_PLAIN = re.compile(r"[a-z0-9_.:-]{1,64}")


class DirectoryStore(Protocol):
    """A store of placements. A placement is a key, as text, with the number of its shard.

    The implementation is in ``models/tables/placement.py``.
    """

    def find(self, group: str, keys: Iterable[str]) -> dict[str, tuple[int, bool]]:
        """Return the placements of the given keys, by key; a key without a placement is left out.

        A placement is a pair: the number of the shard, and whether the placement is committed.
        """

    def place(self, group: str, placements: Mapping[str, int]) -> dict[str, tuple[int, bool]]:
        """Store the given shard number for each key that has no placement yet.

        A key that was placed before keeps its shard. The caller's transaction can neither hide nor
        roll back the placements.

        :return: the placements of all the given keys, in the form that :meth:`find` returns.
        """


class DirectoryStrategy(Strategy):
    """A strategy that places each new key on a random open shard, and looks up the shard of any
    other key.

    The placements (the shards of keys) are in the directory, a table in the global database.

    - If a key has no placement, :meth:`locate` returns None and stores nothing.
    - A placement is committed before the key's first row is written, and outside of the caller's
      transaction. So a rollback of the caller never moves a key that has rows. If two processes
      place the same key at once, the first insert wins, and both processes get its shard.
    - Each process remembers committed placements, at most ``CACHE_SIZE`` of them (an option;
      100,000 by default).

    Cost: remembered keys cost no query. Up to 500 other keys cost one query. If some of these keys
    are new, placing them costs two more round trips.
    """

    option_names = frozenset({"CACHE_SIZE"})
    places = True
    #: The store of placements (shards of keys). ``runtime`` sets it.
    store: DirectoryStore

    def __init__(self, group: ShardGroup, options: Mapping[str, Any]) -> None:
        super().__init__(group, options)
        size = options.get("CACHE_SIZE", 100_000)
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise InvalidConfiguration(
                [f"group {group.name!r}: CACHE_SIZE must be 0 or more, not {size!r}"]
            )
        self._cache_size = size
        self._lock = threading.Lock()
        self._placements: OrderedDict[str, int] = OrderedDict()

    def locate(self, key: Any) -> int | None:
        text = self.entry(key)
        # Read without a lock: a read of a dict is atomic, and a miss only costs a query.
        known = self._placements.get(text)
        return known if known is not None else self._find({text: key})[key]

    def locate_many(self, keys: Iterable[Any]) -> dict[Any, int | None]:
        texts = {self.entry(key): key for key in keys}
        return self._find(texts) if texts else {}

    def place(self, key: Any) -> int:
        known = self._placements.get(self.entry(key))
        return known if known is not None else super().place(key)

    def place_many(self, keys: Iterable[Any]) -> dict[Any, int]:
        numbers = self.locate_many(keys)
        placed = {key: number for key, number in numbers.items() if number is not None}
        return placed | self.place_new(key for key in numbers if key not in placed)

    def place_new(self, keys: Iterable[Any]) -> dict[Any, int]:
        keys_by_text = {self.entry(key): key for key in keys}
        if not keys_by_text:
            return {}
        drawn = {text: self.draw() for text in keys_by_text}
        placed = self._remember(self.store.place(self.group.name, drawn))
        return {keys_by_text[text]: number for text, number in placed.items()}

    def forget(self, key: Any | None = None) -> None:
        """Make this process forget the shard of ``key``, after the key was moved to another shard.

        :param key: a shard key. With None, the default, the process forgets the shards of all keys.
        """
        with self._lock:
            if key is None:
                self._placements.clear()
            else:
                self._placements.pop(self.entry(key), None)

    def succeed(self, former: Strategy) -> None:
        # Keep the remembered placements: they do not depend on the topology. Share the dict with
        # the former strategy: if this strategy forgets a placement, threads that still use the
        # former strategy forget it, too. Do not share the lock, because a fork may have copied the
        # lock in locked state; single operations of the dict are atomic without a lock.
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

    def _find(self, texts: Mapping[str, Any]) -> dict[Any, int | None]:
        numbers: dict[str, int] = {}
        for text in texts:
            known = self._placements.get(text)
            if known is not None:
                numbers[text] = known
        missing = [text for text in texts if text not in numbers]
        if missing:
            numbers |= self._remember(self.store.find(self.group.name, missing))
        return {key: numbers.get(text) for text, key in texts.items()}

    def _remember(self, placements: Mapping[str, tuple[int, bool]]) -> dict[str, int]:
        # Invariant: _placements holds only committed placements. An uncommitted placement may be
        # rolled back with the caller's transaction, and its key would then have no shard.
        with self._lock:
            for text, (number, committed) in placements.items():
                if committed and self._cache_size:
                    self._placements[text] = number
            while len(self._placements) > self._cache_size:
                self._placements.popitem(last=False)
        return {text: number for text, (number, _) in placements.items()}

    def entry(self, key: Any) -> str:
        """Return the text under which the directory stores ``key``. Equal keys give equal texts.

        The key's type does not matter: the integer 7 and the text "7" give the same text.

        :raises InvalidShardKey: the value of ``key`` cannot be a shard key.
        """
        if isinstance(key, str):
            text = exact_text(key, self)
        elif isinstance(key, int) and not isinstance(key, bool):
            text = str(int(key))
        elif isinstance(key, uuid.UUID):
            text = key.hex
        elif isinstance(key, Decimal) and key == key.to_integral_value():
            text = str(int(key))
        else:
            raise self.invalid(key, "integers, text and UUIDs")
        if _PLAIN.fullmatch(text):
            return text
        return f"#{hashlib.sha256(utf8_bytes(text, self)).hexdigest()}"
