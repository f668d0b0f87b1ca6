"""Finds the shards of a query that has no shard key, but a condition on a field with a lookup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sharded_orm.contrib.lookups import entries
from sharded_orm.contrib.lookups.declaration import ModelLookup, lookups_of
from sharded_orm.contrib.lookups.exceptions import LookupRefused
from sharded_orm.contrib.lookups.states import is_known_to_be_served, is_served

#: The largest number of values whose shard keys a process remembers.
MAX_REMEMBERED = 10_000


@dataclass(frozen=True)
class EntryGuess:
    """The shard key that this process remembers for a value of a unique lookup.

    It may be out of date, because another process may have moved the value to another row.

    Implements :class:`~sharded_orm.models.sharding.key_sources.KeyGuess`.
    """

    remembered: dict[tuple[str, str], Any]
    place: tuple[str, str]
    key: Any

    def forget(self) -> None:
        self.remembered.pop(self.place, None)


class EntryKeySource:
    """Finds the shard keys that lookups store for values of a field. Thread-safe.

    Implements :class:`~sharded_orm.models.sharding.key_sources.KeySource`. Costs one query, two for
    one value with many entries, or none if the column has no lookup.

    Returns None for more than 500 values, or if the entries are on several shards, because one
    query cannot read the entries then. Several queries would not be safe: between two of them, the
    value of a row could change, and neither query would find the row.
    """

    def __init__(self) -> None:
        # The shard keys that values of unique lookups had when this process last read them. A key
        # may be out of date, so each caller verifies it. How is explained in
        # sharded_orm.models.querysets.guesses.
        self._remembered: dict[tuple[str, str], Any] = {}

    def keys(self, model: Any, field: Any, values: Sequence[Any]) -> Sequence[Any] | None:
        lookup = _lookup_by(model, field)
        if lookup is None or not is_served(lookup):
            return None
        texts = []
        for value in values:
            try:
                texts.append(lookup.text(value))
            except LookupRefused:
                if not isinstance(value, str) or str(value) != value:
                    return None
                # Skip a text that is too long for the lookup. No row has it, because a write of
                # such a text is refused.
        if len(texts) > entries.MAX_VALUES:
            return None
        key_texts = entries.keys_of_values(lookup.name, texts)
        if key_texts is None:
            return None
        keys = [lookup.key_of_text(text) for text in key_texts]
        if lookup.unique and len(texts) == len(keys) == 1:
            if len(self._remembered) >= MAX_REMEMBERED:
                # Do not protect the dict by a lock. Another thread could hold the lock during a
                # fork, and it would then stay locked in the child.
                self._remembered.clear()
            self._remembered[lookup.name, texts[0]] = keys[0]
        return keys

    def guess(self, model: Any, field: Any, value: Any) -> EntryGuess | None:
        lookup = _lookup_by(model, field)
        if lookup is None or not lookup.unique or not is_known_to_be_served(lookup):
            return None
        try:
            place = lookup.name, lookup.text(value)
        except LookupRefused:
            return None
        return EntryGuess(self._remembered, place, self._remembered.get(place))

    def unique_fields(self, model: Any) -> Sequence[Any]:
        return [
            lookup.field
            for lookup in lookups_of(model)
            if lookup.unique and lookup.problem is None and is_served(lookup)
        ]

    def hint(self, model: Any) -> str:
        lookups = [lookup for lookup in lookups_of(model) if lookup.problem is None]
        waiting = [lookup.field.name for lookup in lookups if not is_served(lookup)]
        if waiting:
            return f"its lookups {waiting!r} are not served yet (run 'manage.py lookups build')"
        if not lookups:
            return ""
        names = [lookup.field.name for lookup in lookups]
        text = (
            f"its lookups {names!r} only find rows by exact values of one of these fields, at most"
            f" {entries.MAX_VALUES!r} of them"
        )
        if any(lookup.table is not None for lookup in lookups):
            text += ", whose entries are on one shard if they are in a table on shards"
        return text


def _lookup_by(model: Any, field: Any) -> ModelLookup | None:
    for lookup in lookups_of(model):
        if lookup.field.column == field.column:
            return lookup if lookup.problem is None else None
    return None
