"""Removes rows from the outboxes of sources after they were delivered, many at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from django.db import Error, connections

from sharded_orm.contrib.mirrors.outbox import remove
from sharded_orm.exceptions import ShardedOrmError

logger = logging.getLogger("sharded_orm.mirrors")

#: A thread removes delivered rows of a shard from the outbox when it has this many of them. A relay
#: that comes first finds that the rows were delivered, and removes them.
REMOVED_AT_ONCE = 100

_of_thread = threading.local()


class Delivered:
    """The ids of outbox rows of one shard that this thread has delivered, but not removed yet."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._numbers: list[int] = []

    @classmethod
    def of_thread(cls, alias: str) -> Delivered:
        by_alias: dict[str, Delivered] = _of_thread.__dict__.setdefault("by_alias", {})
        return by_alias.setdefault(alias, cls(alias))

    def add(self, numbers: Iterable[int]) -> None:
        """Add the ids of delivered rows. If there are many, remove all of them from the outbox. A
        database error is only logged, because a relay removes the rows later.
        """
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
