"""The index rows of former versions of an entity, which may still exist."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sharded_orm.contrib.entities.properties import values_from_json, values_to_json

if TYPE_CHECKING:
    from sharded_orm.contrib.entities.index import Index


class PendingRows:
    """The values of index rows of former versions, by index.

    An entity stores them until the cleaner has removed the rows.

    :param text: the JSON text that the entity stores; None if there are no such rows.
    """

    def __init__(self, text: str | None = None) -> None:
        self._values: dict[str, list[list[Any]]] = json.loads(text) if text else {}

    @property
    def text(self) -> str | None:
        return json.dumps(self._values, separators=(",", ":")) if self._values else None

    def add(self, index: Index, values: tuple[Any, ...] | None) -> None:
        """Add the index row with these values. None means that there was no row."""
        if values is None:
            return
        known = self._values.setdefault(index.name, [])
        if (plain := values_to_json(values)) not in known:
            known.append(plain)

    def of(self, index: Index) -> set[tuple[Any, ...]]:
        """Return the values of those rows that belong to ``index``."""
        rows = set()
        for plain in self._values.get(index.name, ()):
            # If the index had other properties at that time, it had another table, so the row is
            # ignored.
            with suppress(ValueError):
                rows.add(values_from_json(index.fields, plain))
        return rows
