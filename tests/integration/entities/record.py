"""What writers record of a storm, so that readers can judge what they read without further queries.

The properties of an entity follow from its number and from the number of its change. Its writer records in
shared memory which change it has begun, and which one it has done.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any
from uuid import UUID
from zlib import crc32

#: Entities of each writer, which nobody else changes, and entities that all writers count up.
OWN, COUNTERS = 20, 8
#: Entities that nobody changes, and the links to which all entities but counters belong. Each link has as many.
ANCHORS, LINKS = 30, 3
#: The largest number of readers of a storm.
MOST_READERS = 64


def id_of(kind: str, number: int) -> UUID:
    """Return the id of an ``anchor``, a ``counter``, or an ``own`` entity of a writer."""
    return UUID(int=1 + number + 10**6 * ("anchor", "counter", "own").index(kind))


def properties_of(number: int, change: int) -> tuple[int, str, int]:
    """Return the user, the link and the second that a change gives to a writer's own entity."""
    chance = crc32(f"{number} {change}".encode())
    return chance % 5, f"l{chance // 5 % LINKS}", chance // 15 % 30


class Record:
    """Numbers that the processes of a storm share. Each number is written by one process.

    :ivar done: the last change of each own entity whose writer knows that it is committed; then the
        numbers of each writer's committed changes of each counter.
    :ivar begun: the same of changes that were begun.
    :ivar reads: the number of reads of each reader.
    """

    def __init__(self, path: str, writers: int) -> None:
        self.own = writers * OWN
        self._size = self.own + writers * COUNTERS
        # The file is created by the first process, before it starts the others.
        if not Path(path).exists():
            Path(path).write_bytes(bytes(8 * (2 * self._size + MOST_READERS)))
        with open(path, "r+b") as file:
            numbers = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self.done = numbers[: self._size]
        self.begun = numbers[self._size : 2 * self._size]
        self.reads = numbers[2 * self._size :]

    def place(self, counter: int, writer: int) -> int:
        """Return where the writer's changes of a counter are counted."""
        return self.own + writer * COUNTERS + counter

    def count(self, numbers: Any, counter: int) -> int:
        """Return how often all writers have changed the counter, by ``done`` or ``begun``."""
        return sum(numbers[self.own + counter :: COUNTERS])

    def is_right(self, entity: Any, before: Any) -> bool:
        """Whether a reader may have read ``entity``.

        :param before: a copy of ``done`` from before the read.
        """
        kind, number = divmod(entity.id.int - 1, 10**6)
        if kind == 0:
            return bool(entity["title"] == "anchor" and entity["number"] == number)
        if kind == 1:
            least, most = (self.count(numbers, number) for numbers in (before, self.begun))
            return bool(least <= entity["n"] <= most)
        if kind == 2:
            found = entity["user_id"], entity["link"], entity["published"].second
            return bool(
                before[number] <= entity["n"] <= self.begun[number]
                and found == properties_of(number, entity["n"])
            )
        return bool(entity["title"] == "x")  # An entity that lives for a short time.
