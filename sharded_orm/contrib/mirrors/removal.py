"""Removes rows from outboxes, the records of writes for mirrors, after their delivery, in batches."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from django.db import Error, connections

from sharded_orm.contrib.mirrors.outbox import remove
from sharded_orm.exceptions import ShardedOrmError

logger = logging.getLogger("sharded_orm.mirrors")

#: The number of delivered rows of a shard after which a process removes them from the outbox. A
#: relay finds that the remaining rows were delivered, and removes them.
REMOVED_AT_ONCE = 100

_of_thread = threading.local()


class Delivered:
    """The ids of outbox rows of one shard that a thread has delivered, but not removed yet."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._numbers: list[int] = []

    @classmethod
    def of_thread(cls, alias: str) -> Delivered:
        by_alias: dict[str, Delivered] = _of_thread.__dict__.setdefault("by_alias", {})
        return by_alias.setdefault(alias, cls(alias))

    def add(self, numbers: Iterable[int]) -> None:
        """Record that rows were delivered. Remove all delivered rows if there are many. Raises no error."""
        self._numbers += numbers
        if len(self._numbers) < REMOVED_AT_ONCE or connections[self._alias].in_atomic_block:
            return
        try:
            remove(self._alias, self._numbers)
        except (Error, ShardedOrmError) as exc:
            logger.info(
                "delivered rows stay in the outbox of %r until a relay: %s", self._alias, exc
            )
        self._numbers.clear()
