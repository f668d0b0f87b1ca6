"""Removes delivered rows from outboxes, in batches."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from django.db import Error, connections

from sharded_orm.contrib.mirrors.outbox import remove
from sharded_orm.exceptions import ShardedOrmError

logger = logging.getLogger("sharded_orm.mirrors")

#: A process that has delivered so many rows of a shard removes them from its outbox. A relay removes
#: the rest: it finds that they were delivered.
REMOVED_AT_ONCE = 100

_of_thread = threading.local()


class Delivered:
    """The numbers of outbox rows of one shard that a thread has delivered, and not yet removed."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._numbers: list[int] = []

    @classmethod
    def of_thread(cls, alias: str) -> Delivered:
        by_alias: dict[str, Delivered] = _of_thread.__dict__.setdefault("by_alias", {})
        return by_alias.setdefault(alias, cls(alias))

    def add(self, numbers: Iterable[int]) -> None:
        """Note that rows were delivered. Removes all, if there are many by now. Raises no error."""
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
