"""Compares mirrors with their sources, and mends rows that differ.

Rows may be written meanwhile. So a row that differs is read again, and what is still in an outbox is
not a difference: a relay will deliver it.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from django.db import transaction
from django.db.models import QuerySet

from sharded_orm import runtime
from sharded_orm.contrib.mirrors.declaration import Mirror, Source, text_of
from sharded_orm.contrib.mirrors.delivery import deliver, rows_to_deliver
from sharded_orm.contrib.mirrors.outbox import OutboxEntry, WrittenRow, outbox_rows, record
from sharded_orm.contrib.mirrors.rows import MirrorRow, stored_versions, write_rows
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from sharded_orm.models.sharding.bound_key import unbound

#: Rows that are compared at once.
PAGE = 1000
# A row that is written again and again differs each time it is read, but the differences are others.
_LOOKS = 3


class Kind(StrEnum):
    """In which way a mirror differs from its source."""

    MISSING = "missing"
    """The source has the row, and the mirror does not."""
    STALE = "stale"
    """The values of the row differ."""
    ORPHANED = "orphaned"
    """The source has no such row any more."""
    MISPLACED = "misplaced"
    """The row belongs to nobody here: its source has another key, or does not belong in the mirror."""


@dataclass(frozen=True)
class Difference:
    """A row that differs.

    :param alias: the shard of the mirror that has the row, or should have it; None if its key has no
        shard yet.
    :param source_key: the shard key of the source's row; None if it is not known.
    """

    mirror: Mirror
    kind: Kind
    pk: Any
    alias: str | None
    source_key: Any

    def __str__(self) -> str:
        where = f" on {self.alias}" if self.alias else ""
        return f"{self.mirror.label}(pk={self.pk!r}){where} is {self.kind}"


@dataclass
class ComparisonReport:
    """The outcome of a comparison.

    :param compared: number of rows that were read from the source and from the mirror, taken together.
    :param pending: number of rows that differ because a relay has not delivered them yet.
    :param repaired: number of differences that were mended.
    """

    compared: int = 0
    pending: int = 0
    repaired: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def counts(self) -> Counter[Kind]:
        return Counter(difference.kind for difference in self.differences)


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
                _settle(mirror, suspects, report, repair=repair)
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


@dataclass(frozen=True)
class _Suspect:
    """A row that may differ.

    :param source_key: None if it is not known.
    :param mirror_keys: shard keys in the mirror under which the row was seen or is expected.
    :param aliases: shards that have a row of the mirror which was seen there.
    """

    pk: Any
    source_key: Any
    mirror_keys: frozenset[Any]
    aliases: frozenset[str] = frozenset()


def _suspects_of_source(mirror: Mirror, alias: str, rows: Sequence[Any]) -> list[_Suspect]:
    """Return those rows of the source whose mirror is missing or has other values."""
    key = mirror.names.index(mirror.key.attname)
    expected = {row[0]: (row[1], row[2:]) for row in rows}
    stored = _mirror_rows(mirror, {values[key] for _, values in expected.values()}, expected)
    return [
        _Suspect(pk, source_key, frozenset([values[key]]))
        for pk, (source_key, values) in expected.items()
        if stored.get(pk) != values
    ]


def _suspects_of_mirror(mirror: Mirror, alias: str, rows: Sequence[Any]) -> list[_Suspect]:
    """Return those rows of the mirror that have no source which wants them there."""
    homes = _aliases(mirror, {row[1] for row in rows})
    sources = _source_rows(mirror, {row[0]: row[2] if len(row) > 2 else None for row in rows})
    key = mirror.names.index(mirror.key.attname)
    suspects = []
    for pk, mirror_key, *own in rows:
        _, values = sources.get(pk, (None, None))
        if values is None or values[key] != mirror_key or homes.get(mirror_key) != alias:
            source_key = own[0] if own else None
            suspects.append(_Suspect(pk, source_key, frozenset([mirror_key]), frozenset([alias])))
    return suspects


def _mirror_rows(mirror: Mirror, keys: Iterable[Any], pks: Iterable[Any]) -> dict[Any, Any]:
    """Return the values of rows of the mirror, read from the shards of ``keys``, by primary key."""
    key = mirror.options.key
    assert key is not None
    with unbound():
        rows: Any = ShardedQuerySet(mirror.model).uncached().order_by()
        rows = rows.filter(**{f"{key.attname}__in": list(keys), "pk__in": list(pks)})
        found = rows.values_list(mirror.model._meta.pk.attname, *mirror.attributes)
        return {pk: tuple(values) for pk, *values in found}


def _source_rows(mirror: Mirror, source_keys: dict[Any, Any]) -> dict[Any, tuple[Any, Any]]:
    """Return the shard key and values of the rows that the mirror is to have, by primary key.

    :param source_keys: the shard keys of the source, by primary key. If one is None, all shards are
        asked.
    """
    source = mirror.source
    with unbound():
        rows: Any = ShardedQuerySet(source.model).uncached().order_by()
        rows = rows.filter(pk__in=list(source_keys))
        if None in source_keys.values():
            rows = rows.scatter()
        else:
            rows = rows.filter(**{f"{source.key.attname}__in": list(set(source_keys.values()))})
        rows = rows.exclude(**{f"{mirror.key.attname}__isnull": True})
        if mirror.condition is not None:
            rows = rows.filter(mirror.condition)
        names = (source.pk.attname, source.key.attname, *mirror.names)
        return {pk: (key, tuple(values)) for pk, key, *values in rows.values_list(*names)}


def _aliases(mirror: Mirror, keys: Iterable[Any]) -> dict[Any, str]:
    group, field = mirror.options.group, mirror.options.key
    assert field is not None
    prepared = {key: field.get_prep_value(key) for key in keys}
    numbers = runtime.strategy(group).locate_many(dict.fromkeys(prepared.values()))
    return {
        key: runtime.shard(group, number).alias
        for key, value in prepared.items()
        if (number := numbers[value]) is not None
    }


# ##### A closer look #####


def _settle(
    mirror: Mirror, suspects: list[_Suspect], report: ComparisonReport, *, repair: bool
) -> None:
    """Look at ``suspects`` again; report those that differ, and mend them if ``repair`` is true."""
    findings: dict[Any, list[tuple[Difference, MirrorRow, int | None]]] = {}
    states: dict[Any, Any] = {}
    for look in range(_LOOKS):
        versions, differing = _look(mirror, suspects)
        # A row whose source was written since the last look is not settled: leave it to the next one.
        findings = {
            suspect.pk: found
            for suspect in suspects
            if (found := differing.get(suspect.pk))
            and (look == 0 or states.get(suspect.pk) == versions.get(suspect.pk))
        }
        states = versions
        suspects = [suspect for suspect in suspects if suspect.pk in findings]
        if not suspects:
            return
    pending = _pending(mirror, suspects, findings)
    for suspect in suspects:
        if suspect.pk in pending:
            report.pending += 1
            continue
        for difference, row, version in findings[suspect.pk]:
            report.differences.append(difference)
            if repair:
                _repair(mirror, difference, row, version)
                report.repaired += 1


def _look(
    mirror: Mirror, suspects: Sequence[_Suspect]
) -> tuple[dict[Any, Any], dict[Any, list[tuple[Difference, MirrorRow, int | None]]]]:
    """Compare ``suspects`` once more.

    :returns: the state of each row of the source, and what differs for each row: what to write, and
        the version that the shard had before the source was read.
    """
    wanted = _source_rows(mirror, {s.pk: s.source_key for s in suspects})
    key = mirror.names.index(mirror.key.attname)
    keys = {k for s in suspects for k in s.mirror_keys} | {v[key] for _, v in wanted.values()}
    homes = _aliases(mirror, keys)
    by_alias: dict[str, set[Any]] = defaultdict(set)
    for suspect in suspects:
        for alias in suspect.aliases:
            by_alias[alias].add(suspect.pk)
        for k in suspect.mirror_keys:
            if k in homes:
                by_alias[homes[k]].add(suspect.pk)
        if suspect.pk in wanted and (k := wanted[suspect.pk][1][key]) in homes:
            by_alias[homes[k]].add(suspect.pk)
    versions: dict[tuple[str, Any], int | None] = {}
    for alias, pks in by_alias.items():
        for pk, version in stored_versions(mirror, alias, pks).items():
            versions[alias, pk] = version
    # Read the source only now: it is at least as new as the versions.
    wanted = _source_rows(mirror, {s.pk: s.source_key for s in suspects})
    existing = _source_keys(mirror, suspects)
    differing: dict[Any, list[tuple[Difference, MirrorRow, int | None]]] = defaultdict(list)
    seen: set[Any] = set()
    for alias, pks in by_alias.items():
        own_key = mirror.options.key
        assert own_key is not None
        stored = {
            pk: tuple(values)
            for pk, *values in QuerySet(mirror.model, using=alias)
            .filter(pk__in=pks)
            .values_list(mirror.model._meta.pk.attname, *mirror.attributes)
        }
        for pk in pks:
            source_key, values = wanted.get(pk, (existing.get(pk), None))
            there = values if values is not None and homes.get(values[key]) == alias else None
            if there is not None:
                seen.add(pk)
            if stored.get(pk) == there:
                continue
            if there is not None:
                kind = Kind.MISSING if pk not in stored else Kind.STALE
            else:
                kind = Kind.MISPLACED if pk in existing else Kind.ORPHANED
            version = versions[alias, pk]
            differing[pk].append(
                (
                    Difference(mirror, kind, pk, alias, source_key),
                    MirrorRow(pk, version or 0, there),
                    version,
                )
            )
    for pk, (source_key, values) in wanted.items():
        if pk not in seen and homes.get(values[key]) is None:
            # The key has no shard yet. A delivery gives it one.
            difference = Difference(mirror, Kind.MISSING, pk, None, source_key)
            differing[pk].append((difference, MirrorRow(pk, 0, values), None))
    return wanted, differing


def _source_keys(mirror: Mirror, suspects: Sequence[_Suspect]) -> dict[Any, Any]:
    """Return the shard key of each row of the source that exists, whether the mirror wants it or not."""
    source = mirror.source
    with unbound():
        rows: Any = ShardedQuerySet(source.model).uncached().order_by()
        rows = rows.filter(pk__in=[s.pk for s in suspects])
        keys = {s.source_key for s in suspects}
        if None in keys:
            rows = rows.scatter()
        else:
            rows = rows.filter(**{f"{source.key.attname}__in": list(keys)})
        return dict(rows.values_list(source.pk.attname, source.key.attname))


def _pending(mirror: Mirror, suspects: Sequence[_Suspect], findings: dict[Any, Any]) -> set[Any]:
    """Return those ``suspects`` that are in an outbox, so that a relay will deliver them."""
    source = mirror.source
    texts = {text_of(source.pk, suspect.pk): suspect.pk for suspect in suspects}
    strategy = runtime.strategy(source.options.group)
    keys = {
        difference.source_key for suspect in suspects for difference, _, _ in findings[suspect.pk]
    }
    if None in keys or strategy.moves_keys:
        # A key may have moved after its row was written, or it is not known.
        shards = list(runtime.group(source.options.group).shards())
    else:
        numbers = strategy.locate_many({source.key.get_prep_value(k) for k in keys})
        shards = [
            runtime.shard(source.options.group, number)
            for number in set(numbers.values())
            if number is not None
        ]
    pending: set[Any] = set()
    for shard in shards:
        rows = outbox_rows(shard.alias).filter(source=source.label, row__in=texts)
        pending.update(texts[text] for text in rows.values_list("row", flat=True))
    return pending


def _repair(mirror: Mirror, difference: Difference, row: MirrorRow, version: int | None) -> None:
    """Mend one row, unless somebody has delivered it since it was compared."""
    if row.values is None:
        assert difference.alias is not None
        write_rows(mirror, difference.alias, [row], unchanged={row.pk: version})
        return
    key = row.values[mirror.names.index(mirror.key.attname)]
    written = WrittenRow(row.pk, difference.source_key, {mirror.key.attname: frozenset([key])})
    entry = _record(mirror.source, written)
    if version is not None and version >= entry.version:
        # The source was restored from a backup, and counts from an earlier number again. Its versions
        # must win from now on.
        assert difference.alias is not None
        reset = MirrorRow(row.pk, entry.version - 1, row.values)
        write_rows(mirror, difference.alias, [reset], unchanged={row.pk: version})
    for exc in deliver(rows_to_deliver([entry]), [mirror]).values():
        raise exc


def _record(source: Source, written: WrittenRow) -> OutboxEntry:
    """Write a row into the outbox of its shard, as if it had been saved."""
    options = source.options
    shard = options.place_key(options.group, source.key.get_prep_value(written.key))
    with transaction.atomic(using=shard.alias):
        (entry,) = record(source, shard.alias, [written])
    return entry
