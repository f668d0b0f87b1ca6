"""Keeps the shard of a row while the row is saved, so that the routing strategy is asked once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sharded_orm.backends.group import relocation
from sharded_orm.topology.model import Shard


class KeptShard:
    """The shard that was last found for one row, kept until :meth:`close`.

    The router, ``save_base()`` and the insert each ask for the shard of a row. The kept shard answers
    only for the same key value and the same topology, because a receiver of ``pre_save`` may change
    the key, and the topology may change meanwhile.
    """

    def __init__(self) -> None:
        self._is_open = True
        self._question: tuple[Any, ...] | None = None
        self._shard: Shard | None = None

    def close(self) -> None:
        """Stop keeping a shard, also for copies of the row, which share this object."""
        self._is_open = False

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # Deep copies and pickles of the row keep no shard.

    def find(
        self, group: str, value: Any, find: Callable[[str, Any], Shard | None]
    ) -> Shard | None:
        """Return the shard kept for ``value``; otherwise call ``find(group, value)`` and keep its result."""
        if not self._is_open or isinstance(value, bytearray | memoryview):
            # A mutable value may later be another key, so no shard is kept for it.
            return find(group, value)
        # The generation counts changes of the topology. It is read before the look-up: if the topology
        # changes in between, the next call looks up again.
        question = (relocation.generation, group, type(value), value)
        if self._shard is None or question != self._question:
            self._shard, self._question = find(group, value), question
        return self._shard


@contextmanager
def keep_shard(instance: Any) -> Iterator[None]:
    """Within the block, look up the shard of ``instance`` only once per key."""
    state = instance._state
    kept = state.kept_shard = KeptShard()
    try:
        yield
    finally:
        kept.close()
        state.__dict__.pop("kept_shard", None)


def find_shard(
    instance: Any, group: str, value: Any, find: Callable[[str, Any], Shard | None]
) -> Shard | None:
    """Return the shard of ``value`` in ``group``. While ``instance`` is saved, use the kept shard.

    :param value: the shard key of ``instance``, or an id that ``instance`` refers to.
    :param find: :func:`runtime.locate` or :func:`runtime.place`.
    """
    kept: KeptShard | None = instance._state.__dict__.get("kept_shard")
    return find(group, value) if kept is None else kept.find(group, value, find)
