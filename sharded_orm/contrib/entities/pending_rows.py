"""The list of index rows that earlier versions of an entity had, and that may still be stored.

When a property of an entity changes, its former index row is stale, and a cleaner removes it later.
Until then the column ``pending`` of the entity lists the row, as one line of a text. Writers only
append lines, or move a line to the end, by SQL. So a writer need not read the text, and cannot lose
a line that another writer has appended.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django.db.models import F, TextField, Value
from django.db.models.functions import Coalesce, Concat, Length, Replace, Right
from django.db.models.lookups import In, LessThan

from sharded_orm.contrib.entities.properties import values_from_json, values_to_json

if TYPE_CHECKING:
    from sharded_orm.contrib.entities.index import Index


#: A writer that appends late rows to a text ends the text with a new line of random characters.
#: This is the length of that line. If the line has not changed since the text was read, no late
#: rows were appended.
_END = 26
#: Writers add nothing to a text that has this many characters, but raise ``FormerRowsFull``.
#: MariaDB would replace a text that is larger than ``max_allowed_packet`` by NULL, and the rows in
#: it would be forgotten.
MOST = 500_000


class PendingRows:
    """The index rows that earlier versions of an entity had, and that may still be stored.

    :param text: the value of the entity's column ``pending``; None if there are no such rows.
    :raises ValueError: the text is damaged.
    """

    def __init__(self, text: str | None = None) -> None:
        #: The last characters of the text. Whenever late rows are appended, the text ends with new
        #: random characters, so a cleaner can see that rows were appended.
        self.end = text[-_END:] if text else ""
        self._rows = [(name, plain) for name, plain in _lines(text)] if text else []

    def of(self, index: Index) -> set[tuple[Any, ...]]:
        """Return the rows of ``index`` in this list, each as the tuple of its values."""
        rows = set()
        for name, plain in self._rows:
            if name == index.name:
                # Ignore a row that does not fit the properties of the index. When it was stored,
                # the index of this name had other properties and another table.
                with suppress(ValueError):
                    rows.add(values_from_json(index.fields, plain))
        return rows


def _lines(text: str) -> Iterator[Any]:
    at = 0
    if text.startswith("{"):
        # Before version 0.1.0, the text was one JSON object, which maps the name of each index to a
        # list of rows. Since then, writers have appended lines to such an old text.
        rows, at = json.JSONDecoder().raw_decode(text)
        for name, of_index in rows.items():
            yield from ([name, plain] for plain in of_index)
    yield from map(json.loads, text[at:].splitlines())


def ends_with(ends: Iterable[str]) -> In:
    """Return the condition that the column ``pending`` ends with one of ``ends``.

    With this condition, a cleaner removes the mark of an entity only if no late rows were appended
    since it has read the entity. Only the ends of the texts are compared, because the whole texts
    may be too long for one statement.

    :param ends: ends of texts, as in :attr:`PendingRows.end`.
    """
    return In(Right("pending", _END), [*ends])


def has_room() -> LessThan:
    """Return the condition that the column ``pending`` is short enough to append rows to it."""
    return LessThan(Coalesce(Length("pending"), 0), MOST)


def with_rows(
    rows: Iterable[tuple[Index, tuple[Any, ...] | None]], *, is_late: bool = False
) -> Concat | F:
    """Return an SQL expression that appends ``rows`` to the column ``pending``.

    :param rows: pairs (index, values of the entity's row in this index). The values are None if the
        entity has no row there.
    :param is_late: whether the rows were written late. If True, the text of the
        column gets a new, random end. So a cleaner that read the text earlier notices that rows
        were appended, and keeps the mark of the entity.
    """
    lines = [[index.name, values_to_json(values)] for index, values in rows if values is not None]
    if is_late:
        lines.append(["", [secrets.token_hex(8)]])
    text: Any = F("pending")
    added = [f"{json.dumps(line, separators=(',', ':'))}\n" for line in lines]
    for line in added:
        # Remove the line before it is appended below, so that no line is in the text twice. A line
        # is never a part of a longer line, because the lists of values contain no lists.
        text = Replace(text, Value(line), output_field=TextField())
    return Concat(text, Value("".join(added)), output_field=TextField()) if added else text
