"""The checker of staleness: it knows which answers a read may give.

An answer is *stale* if it is older than the state of the database before the read began.

A lane is a set of rows of one owner that are written one transaction after the other. Every
transaction takes the lock of the lanes that it touches (a row of the table ``truth`` for each),
changes rows, raises the lane's *epoch*, and records the state of the whole lane: in ``truth``,
which holds the last state, and in ``history``, which holds all states. It does so in the
transaction of the change itself. So every state of a lane that the database shows is in its
history, in the order of epochs, and a transaction that was rolled back or killed leaves none.

(In the lane for writes of one row in autocommit, triggers do the same.)

A reader first reads ``truth`` by plain SQL, on a connection unknown to the library. It then asks
its question through the cache. The answer must follow from *one* state of each lane, and this
state must be the state in ``truth`` or a later one. If it is a later one, the reader reads
``truth`` again, and takes the states in between from ``history``.

So the checker finds a list that lacks a new row, a list with a row that was deleted, moved or
hidden, and a list whose rows are from several states of a lane. It never takes a concurrent
change for staleness. It does not check consistency across lanes, as that would need the locks of
all of them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tests.integration.cache.faults.databases import database_at
from tests.integration.cache.faults.process_setup import ALBUMS, ALL_LANES, ITEMS, schema_of
from tests.services.addresses import ServerAddress

#: Id, album, whether it is shown, stamp.
Line = tuple[int, int, bool, int]
State = tuple[Line, ...]
ALL_KINDS = ("get", "list", "lane", "album", "shelf", "count", "exists")
_SLICE = 4
_MEMORY = 40  # number of older epochs to look at


def state_text(lines: Iterable[Line]) -> str:
    """Return a state as text."""
    return json.dumps([list(line) for line in lines])


@lru_cache(maxsize=4096)
def state(text: str) -> State:
    return tuple(
        (item, album, bool(shown), stamp) for item, album, shown, stamp in json.loads(text)
    )


@dataclass(frozen=True)
class Question:
    """One cached read.

    ====== ===================================================
    get    one row by its primary key, which may not exist
    list   all rows that are shown
    lane   the first shown rows of a lane
    album  all rows of an album
    shelf  the shown rows of an album in a lane
    count  number of rows that ``lane`` would give without its limit
    exists whether ``shelf`` has any row
    ====== ===================================================
    """

    kind: str
    owner: int
    lane: int
    album: int
    item: int

    @property
    def lanes(self) -> tuple[int, ...]:
        return ALL_LANES if self.kind in ("list", "album") else (self.lane,)

    def ask(self, rows: Any) -> Any:
        """Return the library's answer.

        :param rows: a queryset of the owner's rows.
        """
        match self.kind:
            case "get":
                try:
                    return (rows.get(item_id=self.item),)
                except rows.model.DoesNotExist:
                    return ()
            case "list":
                return tuple(rows.filter(shown=True).order_by("item_id"))
            case "lane":
                return tuple(rows.filter(lane=self.lane, shown=True).order_by("item_id")[:_SLICE])
            case "album":
                return tuple(rows.filter(album_id=self.album).order_by("item_id"))
            case "shelf":
                return tuple(self._shelf(rows).order_by("item_id"))
            case "count":
                return rows.filter(lane=self.lane, shown=True).count()
            case "exists":
                return self._shelf(rows).exists()
        raise AssertionError(self.kind)

    def _shelf(self, rows: Any) -> Any:
        return rows.filter(album_id=self.album, lane=self.lane, shown=True)

    def expected(self, lane: State) -> Any:
        """Return the lane's part of the answer, if the lane is in this state."""
        match self.kind:
            case "get":
                return tuple(line for line in lane if line[0] == self.item)
            case "list":
                return tuple(line for line in lane if line[2])
            case "lane":
                return tuple(line for line in lane if line[2])[:_SLICE]
            case "album":
                return tuple(line for line in lane if line[1] == self.album)
            case "count":
                return sum(line[2] for line in lane)
        shelf = tuple(line for line in lane if line[1] == self.album and line[2])
        return bool(shelf) if self.kind == "exists" else shelf


def any_question(dice: random.Random, owner: int) -> Question:
    lane = dice.choice(ALL_LANES)
    # About half of the reads of a site are of one row.
    kind = "get" if dice.random() < 0.4 else dice.choice(ALL_KINDS)
    return Question(kind, owner, lane, dice.choice(ALBUMS), dice.choice(ITEMS[owner, lane]))


class StalenessChecker:
    """Reads the truth and compares answers with it. Belongs to one process."""

    def __init__(self, address: ServerAddress) -> None:
        self._connection = database_at(address).connect()
        self._cursor = self._connection.cursor()
        #: Number of answers that were right only because of a concurrent change.
        self.changed = 0

    def truth(self, owner: int) -> dict[int, tuple[int, str]]:
        """Return the epoch and the state of each lane as the database has them now."""
        self._cursor.execute(
            f"SELECT lane, epoch, state FROM {schema_of(owner)}.truth WHERE owner = {owner}"
        )
        return {lane: (epoch, text) for lane, epoch, text in self._cursor.fetchall()}

    def problem(
        self, question: Question, answer: Any, before: dict[int, tuple[int, str]]
    ) -> str | None:
        """Return what is wrong with an answer, or None.

        :param before: the truth before the question was asked.
        """
        parts: dict[int, Any] = {question.lane: answer}
        if isinstance(answer, tuple):
            parts = dict.fromkeys(question.lanes, ())
            for row in answer:
                if (
                    getattr(row, "user_id", 0) != question.owner
                    or row.lane not in parts
                    or row.item_id not in ITEMS[question.owner, row.lane]
                    or row.note != str(row.stamp)
                ):
                    return f"{question}: a row of nobody: {row.__dict__!r}"
                parts[row.lane] += ((row.item_id, row.album_id, row.shown, row.stamp),)
        differ = [
            lane
            for lane in question.lanes
            if parts[lane] != question.expected(state(before[lane][1]))
        ]
        if not differ:
            return None
        after = self.truth(question.owner)
        for lane in differ:
            allowed = range(before[lane][0], after[lane][0] + 1)
            # Includes some states that are too old, to report how old the answer is.
            known = self._history(question.owner, lane, since=allowed.start - _MEMORY)
            if not any(parts[lane] == question.expected(state(known[epoch])) for epoch in allowed):
                fits = [
                    e for e, text in known.items() if parts[lane] == question.expected(state(text))
                ]
                return (
                    f"{question}: {parts[lane]!r} in lane {lane} is none of epochs"
                    f" {allowed.start} to {allowed.stop - 1}, but of {fits[-3:] or 'no one'}:"
                    f" {known[allowed.start]}"
                )
        self.changed += 1
        return None

    def close(self) -> None:
        self._connection.close()

    def _history(self, owner: int, lane: int, since: int) -> dict[int, str]:
        self._cursor.execute(
            f"SELECT epoch, state FROM {schema_of(owner)}.history"
            f" WHERE owner = {owner} AND lane = {lane} AND epoch >= {since} ORDER BY epoch"
        )
        return dict(self._cursor.fetchall())
