"""Pages of a mapping: each page has a part of the objects that belong to one object.

A cursor says where a page ends, so that the next page can begin there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from sharded_orm.contrib.objects.exceptions import DamagedObject, InvalidCursor


@dataclass(frozen=True, order=True)
class Cursor:
    """The end of a page of a mapping.

    It is identified by the last entry of the page. ``sequence`` is the number by which entries are
    sorted, and ``target`` is the id of the last object. The next page begins after this entry.

    ``str(cursor)`` is a text for URLs, and :meth:`parse` turns it into the cursor again. A cursor
    stays valid if objects are added, moved or removed.
    """

    sequence: int
    target: int

    def __str__(self) -> str:
        return f"{self.sequence}.{self.target}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the cursor that ``str(cursor)`` has turned into ``text``.

        :raises InvalidCursor: the text is no cursor.
        """
        try:
            sequence, target = (int(part) for part in str(text).split("."))
        except ValueError as exc:
            raise InvalidCursor(
                f"{text!r} is no cursor of a page. Take page.next, or its str(), or None for the first page."
            ) from exc
        if not (-(1 << 63) <= sequence < 1 << 63 and 0 <= target < 1 << 63):
            raise InvalidCursor(f"{text!r} is out of the range of cursors. Take page.next.")
        return cls(sequence, target)


@dataclass(frozen=True)
class Page:
    """One page of the objects that belong to an object.

    :param objects: the objects in order: as many as the caller asked for, or fewer on the last
        page.
    :param next: the cursor of the next page; None if this is the last page.
    :param damaged: the objects that were left out, because their bodies (the JSON with their
        fields) cannot be read. Maps the id of each such object to the error.
    """

    objects: list[Any]
    next: Cursor | None
    damaged: dict[int, DamagedObject] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.objects)

    def __len__(self) -> int:
        return len(self.objects)
