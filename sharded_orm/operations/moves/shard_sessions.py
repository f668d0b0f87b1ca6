"""The database sessions with which a mover works on shards."""

from __future__ import annotations

from typing import Any, Self

from django.db import connections

from sharded_orm import runtime
from sharded_orm.backends.change_capture import ChangeCapture
from sharded_orm.backends.row_copy import RowCopy
from sharded_orm.database_settings import operator_settings


class ShardSessions:
    """The database sessions of one thread on the shards of a group. A session is opened at its
    first use.

    The sessions use the account ``OPERATOR`` of the node, if there is one. As a context manager,
    the object closes the sessions at the end of the block.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._captures: dict[int, ChangeCapture] = {}
        self._copies: dict[int, RowCopy] = {}

    def capture(self, shard: int) -> ChangeCapture:
        """Return the session for the triggers on a shard.

        It manages the journal of changed rows, the triggers that write the journal, and the fences,
        which refuse writes.
        """
        if shard not in self._captures:
            wrapper, account = self._open(shard)
            self._captures[shard] = wrapper.change_capture(account)
        return self._captures[shard]

    def copy(self, shard: int) -> RowCopy:
        """Return the session that reads and writes rows of a shard."""
        if shard not in self._copies:
            wrapper, account = self._open(shard)
            self._copies[shard] = wrapper.row_copy(account)
        return self._copies[shard]

    def _open(self, shard: int) -> tuple[Any, dict[str, Any] | None]:
        place = runtime.shard(self._group, shard)
        return connections[place.alias], operator_settings(place.node)

    def close(self) -> None:
        """Close all sessions. The next use opens new ones."""
        sessions: list[ChangeCapture | RowCopy] = [*self._captures.values(), *self._copies.values()]
        self._captures, self._copies = {}, {}
        for session in sessions:
            session.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
