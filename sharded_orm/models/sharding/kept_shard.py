"""Remembers the shard of a row while the row is saved, so that the shard is looked up only once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

from sharded_orm.backends.group import relocation
from sharded_orm.topology.model import Shard


class KeptShard:
    """Remembers the shard that was last looked up for one row, until :meth:`close`.

    Saving a row looks up its shard several times: in the router, in ``save_base()`` and in the
    insert. During the save, a receiver of ``pre_save`` may change the key, or a new topology may be
    loaded. Then the shard is looked up once more.
    """

    def __init__(self) -> None:
        self._is_open = True
        self._question: tuple[Any, ...] | None = None
        self._shard: Shard | None = None
        self._accepted: tuple[Any, ...] | None = None
        #: True after the UPDATE of the row was sent and has found no row. Even then, the row may
        #: exist. If its model is cached, the UPDATE also has a condition on the isolate key, and
        #: the stored row may have another isolate key.
        self.has_found_none = False

    @classmethod
    def of(cls, generation: int, group: str, value: Any, shard: Shard) -> KeptShard:
        """Return an object that remembers ``shard`` as the shard of ``value``.

        :param generation: ``relocation.generation``, which changes with the topology. Read it
            before ``shard`` is looked up, so that a shard from an old topology is not used.
        """
        kept = cls()
        kept._question, kept._shard = (generation, group, type(value), value), shard
        return kept

    def close(self) -> None:
        """Forget the shard, and remember no shard from now on.

        Shallow copies of the row share this object, so they remember no shard, either.
        """
        self._is_open = False

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Reduce the object to None, so that a deep copy or a pickle of the row remembers no shard.
        return type(None), ()

    def find(
        self, group: str, value: Any, find: Callable[[str, Any], Shard | None]
    ) -> Shard | None:
        """Return the shard that is remembered for ``value``, a shard key or an id.

        If no shard is remembered, call ``find(group, value)`` and remember its result.
        """
        if not self._is_open or isinstance(value, bytearray | memoryview):
            # The program may change a mutable value later. So do not remember a shard for it.
            return find(group, value)
        # relocation.generation counts changes of the topology (which says where the shards are).
        # Read it before the look-up, so that the result is not used again if the topology changes
        # during the look-up.
        question = (relocation.generation, group, type(value), value)
        if self._shard is None or question != self._question:
            self._shard, self._question = find(group, value), question
        return self._shard

    def accept(self, alias: str, value: Any) -> None:
        """Remember that a row with the shard key ``value`` belongs on the shard ``alias``.

        One save checks several times whether the row is on the right shard. After the first check
        has called this method, the next checks only call :meth:`is_accepted`.

        :param value: the key as it is on the instance.
        """
        if type(value) in UNCHANGEABLE:
            self._accepted = (relocation.generation, alias, type(value), value)

    def is_accepted(self, alias: str, value: Any) -> bool:
        """Return whether the last call of :meth:`accept` had these arguments.

        Also return False if the topology has changed since that call, if :meth:`close` was called,
        or if the type of ``value`` is not in :data:`UNCHANGEABLE`.
        """
        return self._is_open and self._accepted == (
            relocation.generation, alias, type(value), value,
        )  # fmt: skip


#: Immutable types. Two equal values of one of these types are always the same shard key.
UNCHANGEABLE = frozenset({int, str, UUID})


class keep_shard:
    """Within the ``with`` block, look up the shard of ``instance`` once for each value of its key.

    It is a class because a context manager from a generator function would take three times as
    long.

    :param kept: an object that already remembers the shard of ``instance``; None if the shard was
        not looked up yet.
    """

    __slots__ = ("_kept", "_state")

    def __init__(self, instance: Any, kept: KeptShard | None = None) -> None:
        self._state = instance._state
        self._kept = KeptShard() if kept is None else kept

    def __enter__(self) -> KeptShard:
        self._state.kept_shard = self._kept
        return self._kept

    def __exit__(self, *exc_info: object) -> None:
        self._kept.close()
        self._state.__dict__.pop("kept_shard", None)


def find_shard(
    instance: Any, group: str, value: Any, find: Callable[[str, Any], Shard | None]
) -> Shard | None:
    """Return the shard of a key or id in ``group``; None if ``find`` returns None.

    While ``instance`` is being saved (see :func:`keep_shard`), the shard is looked up only once for
    each value.

    :param value: the shard key of ``instance``, or an id to which ``instance`` refers.
    :param find: the function that looks the shard up: :func:`runtime.locate`,
        :func:`runtime.place`, or a function that calls :func:`row_placement.place_key`.
    """
    kept: KeptShard | None = instance._state.__dict__.get("kept_shard")
    return find(group, value) if kept is None else kept.find(group, value, find)
