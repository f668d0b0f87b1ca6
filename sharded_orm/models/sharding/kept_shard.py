"""Keeps the shard of a row while the row is saved, so that its strategy is asked once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sharded_orm.backends.group import relocation
from sharded_orm.topology.model import Shard


class KeptShard:
    """The last shard that was found for one row, kept until :meth:`close`.

    The router, ``save_base()`` and the insert each ask for the shard of a row. A kept shard holds
    for one value and one topology: a receiver of ``pre_save`` may change the key, and the
    topology may change.
    """

    def __init__(self) -> None:
        self._is_open = True
        self._question: tuple[Any, ...] | None = None
        self._shard: Shard | None = None

    def close(self) -> None:
        """Keep nothing from now on, nor in copies of the row that share this object."""
        self._is_open = False

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # Deep copies and pickles of the row keep no shard.

    def find(
        self, group: str, value: Any, find: Callable[[str, Any], Shard | None]
    ) -> Shard | None:
        """Return ``find(group, value)``, or the shard kept for this value."""
        if not self._is_open or isinstance(value, bytearray | memoryview):
            return find(group, value)  # The object may later hold another key.
        # Read before the look-up: if the topology changes in between, the next call looks up again.
        question = (relocation.generation, group, type(value), value)
        if self._shard is None or question != self._question:
            self._shard, self._question = find(group, value), question
        return self._shard


@contextmanager
def keep_shard(instance: Any) -> Iterator[None]:
    """Keep the shard of ``instance`` within the block."""
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
    """The shard of ``value`` in ``group``; the kept one while ``instance`` is saved.

    :param value: the shard key of ``instance``, or an id that it refers to.
    :param find: :func:`runtime.locate` or :func:`runtime.place`.
    """
    kept: KeptShard | None = instance._state.__dict__.get("kept_shard")
    return find(group, value) if kept is None else kept.find(group, value, find)
