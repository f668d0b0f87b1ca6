"""Answers from the lookups which shard keys the rows of a query have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sharded_orm.contrib.lookups import entries
from sharded_orm.contrib.lookups.declaration import lookups_of
from sharded_orm.contrib.lookups.states import is_served
from sharded_orm.contrib.lookups.exceptions import LookupRefused


class EntryKeySource:
    """A :class:`~sharded_orm.models.sharding.key_sources.KeySource`. Thread-safe.

    One query; none for columns without a lookup. Keys of more than 500 values are not known, because a
    row could go from a value of one query to a value of another in between.
    """

    def keys(self, model: Any, field: Any, values: Sequence[Any]) -> Sequence[Any] | None:
        for lookup in lookups_of(model):
            if lookup.field.column != field.column:
                continue
            if lookup.problem is not None or not is_served(lookup):
                return None
            texts = []
            for value in values:
                try:
                    texts.append(lookup.text(value))
                except LookupRefused:
                    if not isinstance(value, str) or str(value) != value:
                        return None
                    # No row has a text that is too long: its write was refused.
            if len(texts) > entries.MAX_VALUES:
                return None
            return [lookup.key_of_text(text) for text in entries.keys_of_values(lookup.name, texts)]
        return None

    def hint(self, model: Any) -> str:
        waiting = [
            lookup.field.name
            for lookup in lookups_of(model)
            if lookup.problem is None and not is_served(lookup)
        ]
        if not waiting:
            return ""
        return f"its lookups {waiting!r} are not served yet (run 'manage.py lookups build')"
