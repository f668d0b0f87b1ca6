"""The embedded strategy: reads the shard number from bits of an id (Pinterest, P1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sharded_orm.exceptions import InvalidConfiguration, InvalidShardKey
from sharded_orm.routing.base import Strategy
from sharded_orm.topology.model import ShardGroup
from sharded_orm.topology.transitions import KeyRouting

_EXPECTED = "64-bit ids with their shard in them"
_INTEGERS = frozenset({int})


class EmbeddedStrategy(Strategy):
    """A strategy that reads the shard number from bits of the key.

    The shard is ``(key >> SHIFT) & (2**BITS - 1)``. By default, SHIFT is 46 and BITS is 16, so bits
    46 to 61 are the shard number (Pinterest, P1). For example, 241294492511762325 is on shard 3429.
    The shard key is an id that contains its shard number, or a foreign key to such an id. The
    strategy needs no query, and a row can never move to a shard with another number.
    """

    option_names = frozenset({"SHIFT", "BITS"})
    key_routing = KeyRouting.EMBEDDED

    def __init__(self, group: ShardGroup, options: Mapping[str, Any]) -> None:
        super().__init__(group, options)
        self._shift, self._bits = options.get("SHIFT", 46), options.get("BITS", 16)
        sound = isinstance(self._shift, int) and isinstance(self._bits, int)
        if not sound or self._shift < 0 or self._bits < 1 or self._shift + self._bits > 63:
            raise InvalidConfiguration(
                [
                    f"group {group.name!r}: SHIFT {self._shift!r} and BITS {self._bits!r} must lie"
                    " within the 63 bits of a signed BIGINT"
                ]
            )
        self.embedded = (self._shift, self._bits)
        if group.count > 1 << self._bits:
            raise InvalidConfiguration(
                [f"group {group.name!r}: {group.count} shards do not fit in BITS {self._bits!r}"]
            )

    def accepts(self, kind: type) -> bool:
        # The locate() of a subclass may convert keys.
        return kind is int or type(self).locate is not EmbeddedStrategy.locate

    def locate(self, key: Any) -> int | None:
        if not isinstance(key, int) or isinstance(key, bool):
            raise self.invalid(key, _EXPECTED)
        number = self._embedded_in(key)
        return number if number is not None and number < self.group.count else None

    def locate_many(self, keys: Iterable[Any]) -> dict[Any, int | None]:
        # This shortcut takes a fifth of the time of calling locate() for each key. It is correct
        # only if all keys are ids of existing shards. Do not take it in a subclass, which may have
        # a different locate().
        keys = list(keys)
        is_own = type(self) is EmbeddedStrategy
        if is_own and keys and _INTEGERS.issuperset(map(type, keys)) and min(keys) >= 0:
            shift, mask = self._shift, (1 << self._bits) - 1
            numbers = [key >> shift & mask for key in keys]
            if max(keys) < 1 << 63 and max(numbers) < self.group.count:
                return dict(zip(keys, numbers, strict=True))
        return super().locate_many(keys)

    def refusal(self, key: Any) -> InvalidShardKey:
        number = self._embedded_in(key)
        if number is None:
            return self.invalid(key, _EXPECTED)
        return self.invalid(key, f"ids of the shards 0 to {self.group.count - 1}, not of {number}")

    def _embedded_in(self, key: int) -> int | None:
        """Return the shard number in ``key``; None if ``key`` is not an id.

        An id is an integer from 0 to 2**63 - 1. The group may have no shard with this number.
        """
        if not 0 <= key < 1 << 63:
            return None
        number: int = (key >> self._shift) & ((1 << self._bits) - 1)
        return number

    def explain(self, key: Any) -> str:
        if self.locate(key) is None:
            return str(self.refusal(key))
        return f"bits {self._shift} to {self._shift + self._bits - 1} of the id {key!r}"
