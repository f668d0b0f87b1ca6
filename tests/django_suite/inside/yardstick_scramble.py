"""Makes the pools lease any of several sessions, as under load: leaked state shows up."""

from __future__ import annotations

import random
from typing import Any

from sharded_orm.backends.pool import SessionPool

SEED = 20


def install(sessions: int) -> None:
    """Replace "last in, first out" by a random choice among up to ``sessions`` sessions."""
    choose = random.Random(SEED)
    lease = SessionPool.lease

    def lease_any(self: SessionPool[Any]) -> Any:
        if self.idle < sessions and choose.random() < 1 / (1 + self.idle):
            return self._open()
        choose.shuffle(self._idle)
        return lease(self)

    SessionPool.lease = lease_any  # type: ignore[method-assign]
