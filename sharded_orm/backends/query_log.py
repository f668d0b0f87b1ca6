"""Query logs of a thread's shards, collected in the log of their group."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any


class ShardQueryLog(deque[Any]):
    """``connection.queries_log`` of a shard, whose entries go to the log of its group as well.

    So ``assertNumQueries(n, using="photos")`` counts the statements of all shards.
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
    """``connection.queries_log`` of a group; clearing it clears the logs of its shards.

    Django clears the logs of the aliases that it iterates over, and shards are not among them.
    Logs without entries cost nothing.
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
    """``connection.execute_wrappers`` of a shard: its own, and those of its group around them."""

    def __init__(self, group_wrappers: Callable[[], list[Any]]) -> None:
        super().__init__()
        self._group_wrappers = group_wrappers

    def __reversed__(self) -> Iterator[Any]:
        # CursorWrapper._execute_with_wrappers applies wrappers in this order, innermost first.
        wrappers = self._group_wrappers()
        own = super().__reversed__()
        return chain(own, reversed(wrappers)) if wrappers else own
