"""The range strategy: each shard has the rows of one range of keys."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from sharded_orm.exceptions import InvalidConfiguration, InvalidShardKey
from sharded_orm.routing.base import Strategy
from sharded_orm.topology.model import ShardGroup
from sharded_orm.topology.transitions import KeyRouting


class RangeStrategy(Strategy):
    """A strategy in which each shard has the rows of one range of keys.

    The option ``BOUNDS`` lists the lower bound of each shard, ascending. Shard *n* has the keys
    from ``BOUNDS[n]`` up to, but not including, ``BOUNDS[n + 1]``; the last shard has no upper
    bound. With the option ``SIZE`` instead, shard *n* has the integers from ``n * SIZE`` up to, but
    not including, ``(n + 1) * SIZE``. A key outside of all ranges is refused.
    """

    option_names = frozenset({"BOUNDS", "SIZE"})
    key_routing = KeyRouting.RANGES

    def __init__(self, group: ShardGroup, options: Mapping[str, Any]) -> None:
        super().__init__(group, options)
        if ("BOUNDS" in options) == ("SIZE" in options):
            raise InvalidConfiguration(
                [f"group {group.name!r}: the range strategy needs the option BOUNDS or SIZE (one)"]
            )
        if "SIZE" in options:
            size = options["SIZE"]
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise InvalidConfiguration(
                    [f"group {group.name!r}: SIZE must be a positive number, not {size!r}"]
                )
            # A ``range`` object computes each bound on demand, so it takes no memory for the bounds
            # of many shards.
            self._bounds: Sequence[Any] = range(0, (group.count + 1) * size, size)
            self._open_ended = False
        else:
            self._open_ended = True
            try:
                self._bounds = tuple(options["BOUNDS"])
                ascending = all(a < b for a, b in zip(self._bounds, self._bounds[1:], strict=False))
            # BOUNDS is not iterable, or its values cannot be compared. The check that follows
            # refuses it.
            except TypeError:
                self._bounds, ascending = (options["BOUNDS"],), False
            if len(self._bounds) != group.count or not ascending:
                raise InvalidConfiguration(
                    [
                        f"group {group.name!r}: BOUNDS must be {group.count} ascending lower bounds,"
                        f" one per shard, not {self._bounds!r}"
                    ]
                )

    def accepts(self, kind: type) -> bool:
        if type(self).locate is not RangeStrategy.locate:
            return True  # It may convert keys before it compares them.
        try:
            # locate() compares a key with the bounds in the same way.
            _ = kind() < self._bounds[0]
        except TypeError:
            return False
        return True

    def locate(self, key: Any) -> int | None:
        try:
            number = bisect_right(self._bounds, key) - 1
        except TypeError as exc:
            raise self.invalid(key, f"keys comparable with {self._bounds[0]!r}") from exc
        if number < 0 or (not self._open_ended and number >= self.group.count):
            return None
        return number

    def refusal(self, key: Any) -> InvalidShardKey:
        last = "no upper end" if self._open_ended else repr(self._bounds[-1])
        return self.invalid(key, f"keys from {self._bounds[0]!r} up to {last}")

    def explain(self, key: Any) -> str:
        number = self.locate(key)
        if number is None:
            return str(self.refusal(key))
        return f"{key!r} is in the range of keys that begins at {self._bounds[number]!r}"
