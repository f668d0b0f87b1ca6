"""Verifies and repairs rows of a mirror that seem to differ from their source.

Rows may be written meanwhile, so each suspect row is read again. If the write of a row is still in
an outbox, the row does not count as different, because a relay will deliver the write.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from django.db import Error, connections, transaction
from django.db.models import QuerySet

from sharded_orm import runtime
from sharded_orm.contrib.mirrors.declaration import Mirror, Source, text_of, value_of
from sharded_orm.contrib.mirrors.delivery import deliver, rows_to_deliver
from sharded_orm.contrib.mirrors.mirror_rows import (
    MirrorRow,
    StoredVersion,
    stored_versions,
    write_rows,
)
from sharded_orm.contrib.mirrors.outbox import (
    OutboxEntry,
    WrittenRow,
    entry_of,
    outbox_rows,
    record,
    remove,
)
from sharded_orm.contrib.mirrors.relay import MOST_ATTEMPTS
from sharded_orm.contrib.mirrors.source_reads import aliases_of, is_same, source_rows, values_of
from sharded_orm.exceptions import ShardedOrmError
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from sharded_orm.models.sharding import row_placement
from sharded_orm.models.sharding.bound_key import unbound

# A row counts as different only if it differs in this many comparisons, and if the source's row
# does not change between the first and the last one.
_LOOKS = 3


class Kind(StrEnum):
    """The way in which a row of a mirror differs from its source."""

    MISSING = "missing"
    """The source has the row, and the mirror does not."""
    STALE = "stale"
    """The values of the row differ."""
    ORPHANED = "orphaned"
    """The source has no such row any more."""
    MISPLACED = "misplaced"
    """The source has the row, but its copy does not belong on this shard: its shard key has changed, or
    it does not match the mirror's condition.
    """


@dataclass(frozen=True)
class Difference:
    """A row of a mirror that differs from its source.

    :param alias: the shard of the mirror on which the row is, or on which it is missing; None if
        the shard key of the row has no shard yet.
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


#: A triple (difference, row, version). The row is what a repair writes. The version is the one that
#: the mirror's shard had stored before the source was read; None if it had none.
Finding = tuple[Difference, MirrorRow, StoredVersion | None]


@dataclass
class ComparisonReport:
    """The outcome of a comparison of a mirror with its source.

    :param compared: number of rows that were read, from the source and from the mirror together.
    :param pending: number of rows that differ only because a relay has not delivered them yet.
    :param repaired: number of differences that were repaired.
    :param failures: maps each difference that could not be repaired to the error.
    """

    compared: int = 0
    pending: int = 0
    repaired: int = 0
    differences: list[Difference] = field(default_factory=list)
    failures: dict[Difference, Exception] = field(default_factory=dict)

    @property
    def counts(self) -> Counter[Kind]:
        return Counter(difference.kind for difference in self.differences)


@dataclass(frozen=True)
class Suspect:
    """A row that may differ from its source.

    :param source_key: the shard key of the source's row; None if it is not known.
    :param mirror_keys: shard keys in the mirror under which the row was read or is expected.
    :param aliases: shards of the mirror on which the row was read.
    """

    pk: Any
    source_key: Any
    mirror_keys: frozenset[Any]
    aliases: frozenset[str] = frozenset()


# ##### A closer look #####


def settle(
    mirror: Mirror, suspects: list[Suspect], report: ComparisonReport, *, repair: bool
) -> None:
    """Compare ``suspects`` again, the rows that seemed to differ from their source. Add to
    ``report`` those that still differ.

    :param repair: whether to repair them as well.
    """
    findings: dict[Any, list[Finding]] = {}
    states: dict[Any, Any] = {}
    for look in range(_LOOKS):
        present, differing = _look(mirror, suspects)
        # Drop a row if its source was written since the previous look, because the mirror may not
        # have the write yet. A later run of the comparison will compare this row.
        findings = {
            suspect.pk: found
            for suspect in suspects
            if (found := differing.get(suspect.pk))
            and (look == 0 or states.get(suspect.pk) == present.get(suspect.pk))
        }
        states = present
        suspects = [suspect for suspect in suspects if suspect.pk in findings]
        if not suspects:
            return
    recorded = _recorded(mirror, suspects, findings)
    for suspect in suspects:
        found = findings[suspect.pk]
        if any(_is_pending(mirror, entry, found) for entry in recorded.get(suspect.pk, ())):
            report.pending += 1
            continue
        for difference, row, version in found:
            if repair:
                try:
                    if not _repair(mirror, difference, row, version):
                        report.pending += 1
                        continue
                    report.repaired += 1
                except (Error, ShardedOrmError) as exc:
                    report.failures[difference] = exc
            report.differences.append(difference)


def _look(
    mirror: Mirror, suspects: Sequence[Suspect]
) -> tuple[dict[Any, Any], dict[Any, list[Finding]]]:
    """Compare each row of ``suspects`` with the source once.

    :returns: a pair of dicts. The first maps primary keys to the states of the source's rows. The
        second maps the primary keys of rows that differ to their findings (see :data:`Finding`).
    """
    wanted = source_rows(mirror, {s.pk: s.source_key for s in suspects})
    key = mirror.names.index(mirror.key.attname)
    keys = {k for s in suspects for k in s.mirror_keys} | {v[key] for _, v in wanted.values()}
    homes = aliases_of(mirror, keys)
    by_alias: dict[str, set[Any]] = defaultdict(set)
    for suspect in suspects:
        for alias in suspect.aliases:
            by_alias[alias].add(suspect.pk)
        for k in suspect.mirror_keys:
            if k in homes:
                by_alias[homes[k]].add(suspect.pk)
        if suspect.pk in wanted and (k := wanted[suspect.pk][1][key]) in homes:
            by_alias[homes[k]].add(suspect.pk)
    versions: dict[tuple[str, Any], StoredVersion | None] = {}
    for alias, pks in by_alias.items():
        for pk, version in stored_versions(mirror, alias, pks).items():
            versions[alias, pk] = version
    # Read the source after the versions. In the other order, a write in between could be
    # delivered, and the repair would then overwrite it with the older rows of the source.
    wanted = source_rows(mirror, {s.pk: s.source_key for s in suspects})
    existing = _source_keys(mirror, suspects)
    differing: dict[Any, list[Finding]] = defaultdict(list)
    seen: set[Any] = set()
    for alias, pks in by_alias.items():
        own_key = mirror.options.key
        assert own_key is not None
        stored = {
            pk: tuple(values)
            for *values, pk in values_of(
                mirror,
                QuerySet(mirror.model, using=alias).filter(pk__in=pks),
                (*mirror.attributes, mirror.model._meta.pk.attname),
            )
        }
        for pk in pks:
            source_key, values = wanted.get(pk, (existing.get(pk), None))
            there = values if values is not None and homes.get(values[key]) == alias else None
            if there is not None:
                seen.add(pk)
            copy = stored.get(pk)
            if copy is there or (copy and there and is_same(copy, there, mirror.json_positions)):
                continue
            if there is not None:
                kind = Kind.MISSING if pk not in stored else Kind.STALE
            else:
                kind = Kind.MISPLACED if pk in existing else Kind.ORPHANED
            version = versions[alias, pk]
            number, key_then = (0, source_key) if version is None else version
            if version is not None and version.key is not None:
                key_then = value_of(mirror.source.key, version.key)
            differing[pk].append(
                (
                    Difference(mirror, kind, pk, alias, source_key),
                    MirrorRow(pk, key_then, number, there),
                    version,
                )
            )
    for pk, (source_key, values) in wanted.items():
        if pk not in seen and homes.get(values[key]) is None:
            # The key has no shard yet. A delivery will assign the key to a shard.
            difference = Difference(mirror, Kind.MISSING, pk, None, source_key)
            differing[pk].append((difference, MirrorRow(pk, source_key, 0, values), None))
    return wanted, differing


def _source_keys(mirror: Mirror, suspects: Sequence[Suspect]) -> dict[Any, Any]:
    """Return a dict that maps primary keys to the shard keys of the source's rows.

    It also has source rows that the mirror does not copy because they do not match its condition.
    """
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


def _recorded(
    mirror: Mirror, suspects: Sequence[Suspect], findings: dict[Any, list[Finding]]
) -> dict[Any, list[OutboxEntry]]:
    """Return a dict that maps primary keys to the outbox entries of ``suspects``.

    Dead letters, which are entries that relays have failed to deliver too often, are left out.
    """
    source = mirror.source
    texts = [text_of(source.pk, suspect.pk) for suspect in suspects]
    strategy = runtime.strategy(source.options.group)
    keys = {difference.source_key for found in findings.values() for difference, _, _ in found}
    if None in keys or strategy.moves_keys:
        # Search the outboxes of all shards, because the shard key of a source's row is not known,
        # or the key may have moved to another shard after the row was written.
        shards = list(runtime.group(source.options.group).shards())
    else:
        numbers = strategy.locate_many({source.key.get_prep_value(k) for k in keys})
        shards = [
            runtime.shard(source.options.group, number)
            for number in set(numbers.values())
            if number is not None
        ]
    recorded: dict[Any, list[OutboxEntry]] = defaultdict(list)
    for shard in shards:
        rows = outbox_rows(shard.alias).filter(source=source.label, row__in=texts)
        for row in rows.filter(attempts__lt=MOST_ATTEMPTS):
            entry = entry_of(source, row)
            recorded[entry.written.pk].append(entry)
    return recorded


def _is_pending(mirror: Mirror, entry: OutboxEntry, found: Sequence[Finding]) -> bool:
    """Whether ``entry`` has not been delivered yet to a shard on which the row differs.

    An entry stays in the outbox for a while after its delivery. So the versions are compared. The
    entry was delivered if the shard has stored its version or a higher one.

    :param found: the differences of the entry's row.
    """
    keys = entry.written.mirror_keys.get(mirror.key.attname, frozenset())
    aliases = set(aliases_of(mirror, keys).values())
    is_newest = all(_may_be_newer(mirror, entry, version) for _, _, version in found)
    return any(
        _may_be_newer(mirror, entry, version)
        and (is_newest or difference.alias is None or difference.alias in aliases)
        for difference, _, version in found
    )


def _may_be_newer(mirror: Mirror, entry: OutboxEntry, version: StoredVersion | None) -> bool:
    if version is None or version.key not in (
        None,
        text_of(mirror.source.key, entry.written.key),
    ):
        # No version is stored, or it was made from an outbox id while the source's row had another
        # shard key. That key may be on another shard, whose outbox counts its ids by itself. So the
        # two versions cannot be compared, and the entry may be newer.
        return True
    return entry.version > version.number


def mend(mirror: Mirror, suspects: list[Suspect]) -> None:
    """Bring ``suspects``, rows that seem to differ from their source, up to date.

    Delivers their entries of the outbox, and then repairs the rows that still differ. Must be
    called outside of a transaction.
    """
    found: dict[Any, list[Finding]] = {
        s.pk: [
            (
                Difference(mirror, Kind.STALE, s.pk, None, s.source_key),
                MirrorRow(s.pk, s.source_key, 0, None),
                None,
            )
        ]
        for s in suspects
    }
    recorded = _recorded(mirror, suspects, found)
    entries = [entry for of_row in recorded.values() for entry in of_row]
    deliver(rows_to_deliver(entries), mirror.source.mirrors)
    report = ComparisonReport()
    settle(mirror, suspects, report, repair=True)
    for exc in report.failures.values():
        raise exc


def _repair(
    mirror: Mirror, difference: Difference, row: MirrorRow, version: StoredVersion | None
) -> bool:
    """Repair one row that differs from its source.

    If a delivery has written the row since the comparison, no older state overwrites it.

    :returns: False if the source's row was deleted since the comparison. A relay then delivers the
        deletion.
    """
    if row.values is None:
        assert difference.alias is not None
        write_rows(mirror, difference.alias, [row], unchanged={row.pk: version})
        return True
    key = row.values[mirror.names.index(mirror.key.attname)]
    epoch = mirror.source.epoch_of(difference.source_key)
    keys = {mirror.key.attname: frozenset([key])}
    recorded = _record(mirror.source, WrittenRow(row.pk, difference.source_key, keys, epoch))
    if recorded is None:
        # The row was deleted since the comparison. The deletion has left a row in the outbox, which
        # a relay delivers.
        return False
    alias, entry = recorded
    if not _may_be_newer(mirror, entry, version):
        # The mirror has stored the version of the source or a higher one, and differs all the same.
        # So the source was probably restored from a backup. The mirror would ignore the delivery,
        # because its version is not higher. So first lower the version that the mirror has stored.
        assert difference.alias is not None
        reset = MirrorRow(row.pk, difference.source_key, entry.version - 1, row.values)
        write_rows(mirror, difference.alias, [reset], unchanged={row.pk: version})
    for exc in deliver(rows_to_deliver([entry]), mirror.source.mirrors).values():
        raise exc
    remove(alias, [entry.number])
    return True


def _record(source: Source, written: WrittenRow) -> tuple[str, OutboxEntry] | None:
    """Write a row into the outbox of its shard, as if the row had been saved.

    First lock the row, as a save does. Otherwise a writer whose outbox row has a lower id might
    commit after this transaction, and mirrors would ignore its change.

    :returns: the alias of the shard, and the outbox entry; None if there is no such row.
    """
    options = source.options
    shard = row_placement.place_key(options, source.key.get_prep_value(written.key))
    with transaction.atomic(using=shard.alias):
        row: Any = QuerySet(source.model, using=shard.alias).filter(pk=written.pk).order_by()
        if connections[shard.alias].features.has_select_for_update:
            row = row.select_for_update()
        if not list(row.values_list("pk")):
            return None
        recorded = record(source, shard.alias, [written])
    (entry,) = recorded()
    return shard.alias, entry
