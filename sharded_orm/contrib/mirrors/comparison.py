"""Compares mirrors with their sources, page by page."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from sharded_orm import runtime
from sharded_orm.contrib.mirrors.declaration import Mirror
from sharded_orm.contrib.mirrors.differences import (
    ComparisonReport,
    Suspect,
    aliases_of,
    mirror_rows,
    settle,
    source_rows,
)
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from sharded_orm.models.sharding.bound_key import unbound

#: Rows that are compared at once.
PAGE = 1000


def compare(
    mirror: Mirror,
    *,
    repair: bool = False,
    newest_first: bool = False,
    sample: float | None = None,
) -> Iterator[ComparisonReport]:
    """Compare ``mirror`` with its source. Yield the report after each page of rows.

    Costs two queries per page of 1000 rows of each side, and some more for pages with differences.

    :param repair: whether rows that differ are mended.
    :param newest_first: whether rows with the highest primary keys come first.
    :param sample: the share of pages that are compared, such as 0.1; None for all.
    """
    report = ComparisonReport()
    for pages, suspects_of in (
        (_source_pages(mirror, newest_first), _suspects_of_source),
        (_mirror_pages(mirror, newest_first), _suspects_of_mirror),
    ):
        for alias, rows in pages:
            if sample is not None and random.random() >= sample:
                continue
            report.compared += len(rows)
            suspects = suspects_of(mirror, alias, rows)
            if suspects:
                settle(mirror, suspects, report, repair=repair)
            yield report


def _source_pages(mirror: Mirror, newest_first: bool) -> Iterator[tuple[str, list[Any]]]:
    names = [mirror.source.pk.attname, mirror.source.key.attname, *mirror.names]
    rows: Any = ShardedQuerySet(mirror.source.model)
    rows = rows.exclude(**{f"{mirror.key.attname}__isnull": True})
    if mirror.condition is not None:
        rows = rows.filter(mirror.condition)
    yield from _pages(rows, mirror.source.options.group, names, newest_first)


def _mirror_pages(mirror: Mirror, newest_first: bool) -> Iterator[tuple[str, list[Any]]]:
    key = mirror.options.key
    assert key is not None
    own = [mirror.own_source_key.attname] if mirror.own_source_key is not None else []
    names = [mirror.model._meta.pk.attname, key.attname, *own]
    rows: Any = ShardedQuerySet(mirror.model)
    yield from _pages(rows, mirror.options.group, names, newest_first)


def _pages(
    rows: Any, group: str, names: Sequence[str], newest_first: bool
) -> Iterator[tuple[str, list[Any]]]:
    for shard in runtime.group(group).shards():
        last: Any = None
        while True:
            with unbound():
                page = rows.using(shard.alias).uncached()
                page = page.order_by("-pk" if newest_first else "pk")
                if last is not None:
                    page = page.filter(**{f"pk__{'lt' if newest_first else 'gt'}": last})
                page = list(page.values_list(*names)[:PAGE])
            if not page:
                break
            last = page[-1][0]
            yield shard.alias, page


def _suspects_of_source(mirror: Mirror, alias: str, rows: Sequence[Any]) -> list[Suspect]:
    """Return those rows of the source whose mirror is missing or has other values."""
    key = mirror.names.index(mirror.key.attname)
    expected = {row[0]: (row[1], row[2:]) for row in rows}
    stored = mirror_rows(mirror, {values[key] for _, values in expected.values()}, expected)
    return [
        Suspect(pk, source_key, frozenset([values[key]]))
        for pk, (source_key, values) in expected.items()
        if stored.get(pk) != values
    ]


def _suspects_of_mirror(mirror: Mirror, alias: str, rows: Sequence[Any]) -> list[Suspect]:
    """Return those rows of the mirror that have no source which wants them there."""
    homes = aliases_of(mirror, {row[1] for row in rows})
    sources = source_rows(mirror, {row[0]: row[2] if len(row) > 2 else None for row in rows})
    key = mirror.names.index(mirror.key.attname)
    suspects = []
    for pk, mirror_key, *own in rows:
        _, values = sources.get(pk, (None, None))
        if values is None or values[key] != mirror_key or homes.get(mirror_key) != alias:
            source_key = own[0] if own else None
            suspects.append(Suspect(pk, source_key, frozenset([mirror_key]), frozenset([alias])))
    return suspects
