"""Who knows what may be read: the checker of staleness.

*Stale* is an answer that is older than what the database showed before the read began.

Every transaction on rows of an owner takes the lock of the lanes that it touches (a
row of the table ``truth`` for each), changes rows, raises the lane's *epoch*, and writes
down the state of the whole lane as the table of rows then shows it: into ``truth``, where
the last state stands, and into ``history``, where all of them stand. It is one transaction
with the change itself, so whatever the database shows of a lane is a state of its history,
in the order of epochs, and a transaction that was rolled back or killed leaves none.

(In the lane for writes of one row in autocommit, triggers do the same.)

A reader asks ``truth`` by plain SQL, on a connection that the library knows nothing of. It
then asks its question through the cache. The answer has to be what *one* state of each lane
gives, and this state has to be the one of before or a later one: if it is not the one of
before, the reader asks ``truth`` again, and takes the states up to there from ``history``.
So a list that lacks a new row or has a row that was deleted, moved or hidden is found, and
a list whose rows are of several states of a lane as well. Concurrent changes are never
taken for staleness; and what belongs together across lanes is not examined, for that would
need the lock of all of them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tests.integration.cache.faults.process_setup import ALBUMS, ALL_LANES, ITEMS, schema_of
from tests.services.mariadb import Address

#: Identity, album, whether it is shown, stamp.
Line = tuple[int, int, bool, int]
State = tuple[Line, ...]
ALL_KINDS = ("get", "list", "lane", "album", "shelf", "count", "exists")
_SLICE = 4
_MEMORY = 40  # epochs


def state_text(lines: Iterable[Line]) -> str:
    """A state as text."""
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
    lane   the first ones of those in a lane
    album  all rows of an album
    shelf  those of an album in a lane that are shown
    count  how many ``lane`` would give if it were not cut off
    exists whether ``shelf`` has any
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
        """The answer that the library gives. :param rows: a queryset of the owner's rows."""
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
        """The answer as far as a lane in this state gives it."""
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
    # Half of the reads of a site are of one row.
    kind = "get" if dice.random() < 0.4 else dice.choice(ALL_KINDS)
    return Question(kind, owner, lane, dice.choice(ALBUMS), dice.choice(ITEMS[owner, lane]))


class StalenessChecker:
    """Reads the truth, and compares. Belongs to one process."""

    def __init__(self, address: Address) -> None:
        import MySQLdb

        self._connection = MySQLdb.connect(**address.mysqldb(), autocommit=True)
        self._cursor = self._connection.cursor()
        #: Answers that were right only because something changed while they were read.
        self.changed = 0

    def truth(self, owner: int) -> dict[int, tuple[int, str]]:
        """Epoch and state of each lane, as the database shows them now."""
        self._cursor.execute(
            f"SELECT lane, epoch, state FROM {schema_of(owner)}.truth WHERE owner = {owner}"
        )
        return {lane: (epoch, text) for lane, epoch, text in self._cursor.fetchall()}

    def problem(
        self, question: Question, answer: Any, before: dict[int, tuple[int, str]]
    ) -> str | None:
        """What is wrong with an answer; None if nothing is.

        :param before: the truth from before the question was asked.
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
            # Some that are too old, to tell how old the answer is.
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
