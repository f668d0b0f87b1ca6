"""Keeps the shard of a row while the row is saved, so that the routing strategy is asked only once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sharded_orm.backends.group import relocation
from sharded_orm.topology.model import Shard


class KeptShard:
    """Keeps the shard that was last found for one row, until :meth:`close`.

    Saving a row looks up its shard several times: in the router, in ``save_base()`` and in the
    insert. The kept shard is used only if the key's value and the topology are still the same: a
    receiver of ``pre_save`` may change the key, and the topology may change meanwhile.
    """

    def __init__(self) -> None:
        self._is_open = True
        self._question: tuple[Any, ...] | None = None
        self._shard: Shard | None = None

    def close(self) -> None:
        """Forget the kept shard, and keep no shard from now on.

        This holds for shallow copies of the row too, because they share this object.
        """
        self._is_open = False

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # So a deep copy or a pickle of the row has no kept shard.

    def find(
        self, group: str, value: Any, find: Callable[[str, Any], Shard | None]
    ) -> Shard | None:
        """Return the shard that is kept for ``value``.

        If no shard is kept, call ``find(group, value)``, and keep the result.
        """
        if not self._is_open or isinstance(value, bytearray | memoryview):
            # Do not keep a shard for a mutable value, because the value may later be another key.
            return find(group, value)
        # The generation counts changes of the topology. Read it before the look-up: if the topology
        # changes during the look-up, the next call does not use the result.
        question = (relocation.generation, group, type(value), value)
        if self._shard is None or question != self._question:
            self._shard, self._question = find(group, value), question
        return self._shard


@contextmanager
def keep_shard(instance: Any) -> Iterator[None]:
    """Within the ``with`` block, look up the shard of ``instance`` only once for each value of its
    key.
    """
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
    """Return the shard of a key or id in ``group``; None if ``find`` returns None.

    While ``instance`` is being saved (see :func:`keep_shard`), the shard is looked up only once.

    :param value: the shard key of ``instance``, or an id that ``instance`` refers to.
    :param find: the function that looks the shard up: :func:`runtime.locate`,
        :func:`runtime.place` or :meth:`ShardOptions.place_key`.
    """
    kept: KeptShard | None = instance._state.__dict__.get("kept_shard")
    return find(group, value) if kept is None else kept.find(group, value, find)
