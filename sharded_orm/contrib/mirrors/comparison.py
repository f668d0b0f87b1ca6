"""Compares mirrors with their sources: the models whose rows they copy.

The rows are compared in chunks. A chunk is a range of primary keys. It is read from all shards and
compared, and perhaps repaired, before the next one is read.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sharded_orm import runtime
from sharded_orm.contrib.mirrors.declaration import Mirror
from sharded_orm.contrib.mirrors.differences import ComparisonReport, Suspect, settle
from sharded_orm.contrib.mirrors.outbox import BATCH
from sharded_orm.contrib.mirrors.source_reads import aliases_of, is_same, values_of, wanted_rows
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from sharded_orm.models.sharding.bound_key import unbound

#: The largest number of rows that a chunk has on all shards together. The rows of the source and
#: those of the mirror count. With very many shards, a chunk may be larger, because each shard can
#: contribute :data:`FROM_SHARD` rows in any case.
CHUNK = 8000
#: One shard contributes at most ``CHUNK`` rows, divided by the number of shards, to a chunk. If the
#: result is smaller than this number, a shard contributes up to this number of rows.
FROM_SHARD = 50


def compare(
    mirror: Mirror,
    *,
    repair: bool = False,
    newest_first: bool = False,
    sample: float | None = None,
) -> Iterator[ComparisonReport]:
    """Compare ``mirror`` with its source. Yield the report after each chunk.

    A chunk is a range of primary keys, such as 1 to 8000, with the rows of all shards. Costs two
    queries per chunk for each shard of the source and of the mirror, and some more if there are
    differences.

    :param repair: whether rows that differ are repaired.
    :param newest_first: whether rows with the highest primary keys come first.
    :param sample: the fraction of chunks to compare, such as 0.1; None for all.
    """
    report = ComparisonReport()
    sides = _Sides(mirror, newest_first)
    for after, until in sides.chunks():
        if sample is not None and random.random() >= sample:
            continue
        compared, batches = _compare_chunk(mirror, sides, after, until)
        report.compared += compared
        for suspects in batches:
            settle(mirror, suspects, report, repair=repair)
        yield report


class _Sides:
    """Reads the rows of a source and of its mirror in chunks."""

    def __init__(self, mirror: Mirror, newest_first: bool) -> None:
        self._of, self._newest_first = mirror, newest_first
        mirrored: Any = ShardedQuerySet(mirror.model)
        source = mirror.source
        self._source = [(s.alias, wanted_rows(mirror)) for s in _shards(source.options.group)]
        self._mirror = [(s.alias, mirrored) for s in _shards(mirror.options.group)]
        self._source_names = (*mirror.names, source.key.attname)
        self._mirror_names = mirror.attributes

    def chunks(self) -> Iterator[tuple[Any, Any]]:
        """Yield two primary keys (after, until) for each chunk.

        The chunk begins behind ``after``, and ends with ``until``, which is in the chunk. The first
        chunk has None for ``after``, and the last chunk has None for ``until``.
        """
        after = None
        while True:
            until = self._boundary(after)
            yield after, until
            if until is None:
                return
            after = until

    def _boundary(self, after: Any) -> Any:
        shards = [*self._source, *self._mirror]
        position = max(FROM_SHARD, CHUNK // len(shards))
        pks: list[Any] = []
        for alias, rows in shards:
            with unbound():
                behind = self._range(rows.using(alias), after, None)
                behind = behind.order_by("-pk" if self._newest_first else "pk")
                pks += behind.values_list("pk", flat=True)[position : position + 1]
        # Each shard proposes a primary key as the end of the chunk. Use the one that is nearest to
        # the beginning. If the keys are text, Python may sort them differently than the database,
        # and choose one that is farther away. Then the chunk is larger than it should be. But no
        # row is left out, because the next chunk begins where this one ends.
        return (max if self._newest_first else min)(pks, default=None)

    def source_rows(self, after: Any, until: Any) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of the source in a chunk.

        Each row is a tuple: the values of the fields :attr:`Mirror.names`, then the shard key.
        """
        for _, row in self._rows(self._source, self._source_names, after, until):
            yield row

    def mirror_rows(self, after: Any, until: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yield the rows of the mirror in a chunk, as pairs (alias of the shard, values).

        The values are those of the fields :attr:`Mirror.attributes`.
        """
        return self._rows(self._mirror, self._mirror_names, after, until)

    def _rows(
        self, shards: list[tuple[str, Any]], names: tuple[str, ...], after: Any, until: Any
    ) -> Iterator[tuple[str, tuple[Any, ...]]]:
        for alias, rows in shards:
            with unbound():
                found = self._range(rows.using(alias), after, until).order_by()
                for row in values_of(self._of, found, names):
                    yield alias, row

    def _range(self, rows: Any, after: Any, until: Any) -> Any:
        behind, up_to = ("lt", "gte") if self._newest_first else ("gt", "lte")
        if after is not None:
            rows = rows.filter(**{f"pk__{behind}": after})
        if until is not None:
            rows = rows.filter(**{f"pk__{up_to}": until})
        return rows.uncached()


def _compare_chunk(
    mirror: Mirror, sides: _Sides, after: Any, until: Any
) -> tuple[int, list[list[Suspect]]]:
    """Compare one chunk. Find the suspects: rows that seem to differ from their copies.

    A suspect need not be wrong, because the source and the mirror are not read at the same moment.
    A copy is also suspect if it is not on the shard to which the source's row belongs.

    :returns: the number of compared rows, and batches of suspects. No batch has the same primary
        key twice.
    """
    pk_at = mirror.names.index(mirror.source.pk.attname)
    key_at = mirror.names.index(mirror.key.attname)
    own = mirror.own_source_key
    own_at = None if own is None else mirror.attributes.index(own.attname)
    source = list(sides.source_rows(after, until))
    stored = {(alias, row[pk_at]): row for alias, row in sides.mirror_rows(after, until)}
    count = len(source) + len(stored)
    homes = aliases_of(mirror, {row[key_at] for row in source})
    suspects: dict[Any, Suspect] = {}
    twice = []
    for row in source:
        pk, key = row[pk_at], row[key_at]
        # Take each copy out of ``stored`` when its source row is found. Two shards of the source
        # may have a row with the same id. Then the second one finds no copy, and becomes suspect.
        copy = stored.pop((homes.get(key, ""), pk), None)
        if copy is None or not is_same(copy, row[:-1], mirror.json_positions):
            suspect = Suspect(pk, row[-1], frozenset([key]))
            if suspects.setdefault(pk, suspect) is not suspect:
                twice.append([suspect])
    for (alias, pk), row in stored.items():
        known = suspects.get(pk, Suspect(pk, None if own_at is None else row[own_at], frozenset()))
        suspects[pk] = replace(
            known, mirror_keys=known.mirror_keys | {row[key_at]}, aliases=known.aliases | {alias}
        )
    every = list(suspects.values())
    return count, [every[n : n + BATCH] for n in range(0, len(every), BATCH)] + twice


def _shards(group: str) -> Any:
    return runtime.group(group).shards()
