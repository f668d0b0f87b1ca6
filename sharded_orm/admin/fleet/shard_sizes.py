"""How large shards are on the map."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from django.template.defaultfilters import filesizeformat

from sharded_orm.admin.fleet.shard_map import RangeOnNode
from sharded_orm.backends.sizes import ShardSize


class Measure:
    """How large shards are drawn, and said to be."""

    def __init__(self, sizes: Mapping[str, ShardSize], by: str) -> None:
        self._sizes = sizes
        self._by = by
        self.unknown = 0

    def of(self, alias: str) -> float:
        size = self._sizes.get(alias)
        if self._by == "same" or size is None:
            return 0.0
        return float(size.bytes if self._by == "bytes" else size.rows or 0)

    def of_place(self, place: RangeOnNode) -> float:
        return sum(
            self.of(place.group.shard(number).alias)
            for number in range(place.range.first, place.range.last + 1)
        )

    def text(self, aliases: Sequence[str]) -> str:
        """``12 MB, about 340 rows``; "" if nothing is known."""
        known = [self._sizes[alias] for alias in aliases if alias in self._sizes]
        if not known:
            return ""
        rows = [size.rows for size in known if size.rows is not None]
        told = filesizeformat(sum(size.bytes for size in known)).replace("\xa0", " ")
        return told + (f", about {sum(rows):,} rows" if rows else "")

    def count_unknown(self, aliases: Iterable[str]) -> None:
        if self._by != "same":
            rows = self._by == "rows"
            for alias in aliases:
                size = self._sizes.get(alias)
                self.unknown += size is None or (rows and size.rows is None)
