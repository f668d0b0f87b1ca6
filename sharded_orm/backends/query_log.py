"""Query logs of shards, whose entries are collected in the query log of the shard group."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any


class ShardQueryLog(deque[Any]):
    """The ``queries_log`` of a shard's connection object. Each entry is added to the group's log as well.

    So ``assertNumQueries(n, using="photos")``, for the group, counts the statements of all shards.

    :param group_log: function that returns the query log of the shard's group.
    """

    def __init__(self, maxlen: int | None, group_log: Callable[[], GroupQueryLog]) -> None:
        super().__init__(maxlen=maxlen)
        self._group_log = group_log

    def append(self, entry: Any) -> None:
        super().append(entry)
        log = self._group_log()
        log.append(entry)
        log.filled[id(self)] = self


class GroupQueryLog(deque[Any]):
    """The ``queries_log`` of a group's connection object. Clearing it clears the shards' logs as well.

    Django clears only the logs of the aliases that it iterates over: a group's, but not its shards'.
    Only the logs of shards that have entries are visited.
    """

    def __init__(self, maxlen: int | None) -> None:
        super().__init__(maxlen=maxlen)
        self.filled: dict[int, ShardQueryLog] = {}

    def clear(self) -> None:
        super().clear()
        filled, self.filled = self.filled, {}
        for log in filled.values():
            log.clear()


class ShardExecuteWrappers(list[Any]):
    """The ``execute_wrappers`` of a shard's connection object.

    The list has the shard's own wrappers. When Django applies them, those of the group follow, around
    the shard's.

    :param group_wrappers: function that returns the ``execute_wrappers`` of the shard's group.
    """

    def __init__(self, group_wrappers: Callable[[], list[Any]]) -> None:
        super().__init__()
        self._group_wrappers = group_wrappers

    def __reversed__(self) -> Iterator[Any]:
        # CursorWrapper._execute_with_wrappers iterates in this order: the innermost wrapper comes first.
        wrappers = self._group_wrappers()
        own = super().__reversed__()
        return chain(own, reversed(wrappers)) if wrappers else own
