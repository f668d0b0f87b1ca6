"""Query logs of shards. Each entry is also added to the query log of the shard group."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any


class ShardQueryLog(deque[Any]):
    """The ``queries_log`` of a shard's connection object. Each entry is also added to the group's log.

    So ``assertNumQueries(n, using="photos")``, where ``photos`` is the group, counts the statements of
    all its shards.

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
    """The ``queries_log`` of a group's connection object. Clearing it also clears the shards' logs.

    At the start of a request, Django clears the query logs of all aliases in ``connections``. When
    it iterates over ``connections``, it gets the group, but not the shards. So when Django clears
    the group's log, this class clears the logs of the shards. To be fast with thousands of shards,
    it visits only the logs that have entries (``filled``).
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

    A wrapper can be installed on one shard (``connections["photos_00042"].execute_wrapper()``) or
    on the whole group (``connections["photos"].execute_wrapper()``). The list has only the shard's
    wrappers. But ``reversed()``, with which Django goes through the list, also returns the wrappers
    of the group. So the group's wrappers run, too, around those of the shard.

    :param group_wrappers: function that returns the ``execute_wrappers`` of the shard's group.
    """

    def __init__(self, group_wrappers: Callable[[], list[Any]]) -> None:
        super().__init__()
        self._group_wrappers = group_wrappers

    def __reversed__(self) -> Iterator[Any]:
        # Django iterates over the wrappers with reversed(), and the first wrapper that it gets becomes
        # the innermost one. The group's wrappers enclose the shard's, so yield the shard's first.
        wrappers = self._group_wrappers()
        own = super().__reversed__()
        return chain(own, reversed(wrappers)) if wrappers else own
