"""The rows that were selected for an action, by shard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.db import Error
from django.db.models import Q

from sharded_orm.admin.failures import Outages
from sharded_orm.admin.identity import Identity, parse
from sharded_orm.admin.misplaced_rows import misplaced
from sharded_orm.exceptions import InvalidObjectID, ShardedOrmError
from sharded_orm.models.sharding.options import ShardOptions
from sharded_orm.routing.where import OnShard
from sharded_orm.topology.model import Shard


@dataclass(frozen=True)
class Part:
    """The selected rows of one shard: a queryset that names its alias, and their number."""

    shard: Shard
    rows: Any
    count: int

    @property
    def alias(self) -> str:
        return self.shard.alias


@dataclass(frozen=True)
class ActionSelection:
    """The selected rows of all shards.

    :param outages: the shards that could not count their rows.
    :param queryset: all selected rows in one queryset.
    :param unknown: the number of object ids that led to no row.
    :param misplaced: alias -> the number of rows left out because their keys lead elsewhere.
    """

    parts: tuple[Part, ...]
    outages: Outages
    queryset: Any
    unknown: int = 0
    misplaced: Mapping[str, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(part.count for part in self.parts)


def select(
    options: ShardOptions, queryset: Any, object_ids: Iterable[str], within: Shard | None
) -> ActionSelection:
    """The rows of ``queryset`` with these object ids.

    Object ids that are forged, outdated or of misplaced rows lead to no row. Costs a count per
    shard. Object ids that are primary keys alone cost one query more, for the keys of their rows.

    :param within: the shard of the page, if its scope is one: no other rows are selected then,
        and a primary key alone is enough, as on pages of actions written for Django's admin.
    """
    by_shard: dict[Shard, list[Identity]] = {}
    unknown = 0
    for object_id in dict.fromkeys(object_ids):
        try:
            identity = parse(options, object_id, within)
        except InvalidObjectID:
            unknown += 1
            continue
        # A misplaced row must not be written.
        if identity.misplaced or (within is not None and identity.shard != within):
            unknown += 1
            continue
        by_shard.setdefault(identity.shard, []).append(identity)
    pk_tells_shard = options.names_shard(
        options.model._meta.pk
    )  # It leads to where the row belongs.
    outages = Outages()
    all_selected = Q()
    rows_by_shard: dict[Shard, Any] = {}
    for shard, identities in sorted(by_shard.items(), key=lambda item: item[0].number):
        condition = _any_of(identities)
        if not pk_tells_shard and any(identity.key is None for identity in identities):
            try:
                elsewhere = misplaced(options, queryset.using(shard.alias).filter(condition), shard)
            except (Error, ShardedOrmError) as error:
                outages.add(shard, error)
                continue
            if elsewhere is not None:
                condition &= ~elsewhere
        # Another shard may have a copy of these rows, left behind by a move.
        all_selected |= condition & Q(OnShard(shard.alias))
        rows_by_shard[shard] = queryset.using(shard.alias).filter(condition)
    parts = _parts(rows_by_shard.items(), outages)
    answered = [shard for shard in rows_by_shard if shard.alias not in outages.errors]
    unknown += sum(len(by_shard[shard]) for shard in answered) - sum(part.count for part in parts)
    selected = queryset.filter(all_selected) if rows_by_shard else queryset.none()
    return ActionSelection(parts, outages, selected, unknown)


def select_all(options: ShardOptions, queryset: Any, shards: Iterable[Shard]) -> ActionSelection:
    """All rows of ``queryset`` on ``shards``, except misplaced ones.

    Costs a count per shard, and what :func:`misplaced` costs.
    """
    outages = Outages()
    rows_by_shard: dict[Shard, Any] = {}
    misplaced_counts: dict[str, int] = {}
    all_selected = Q()
    for shard in shards:
        if outages.is_lost(shard):
            continue
        rows = queryset.using(shard.alias)
        condition = Q(OnShard(shard.alias))
        try:
            elsewhere = misplaced(options, rows, shard)
            if elsewhere is not None:
                misplaced_counts[shard.alias] = rows.filter(elsewhere).count()
                rows, condition = rows.exclude(elsewhere), condition & ~elsewhere
        except (Error, ShardedOrmError) as error:
            outages.add(shard, error)
            continue
        rows_by_shard[shard] = rows
        all_selected |= condition
    parts = _parts(rows_by_shard.items(), outages)
    selected = queryset.filter(all_selected) if misplaced_counts else queryset
    return ActionSelection(parts, outages, selected, misplaced=misplaced_counts)


def _any_of(identities: list[Identity]) -> Q:
    """The condition for the rows with these primary keys, and shard keys where there are any."""
    pks: dict[Any, list[Any]] = {}
    for identity in identities:
        pks.setdefault(identity.key, []).append(identity.pk)
    condition = Q()
    for key, values in pks.items():
        # Not pk__in: SQLite fails with a number that no column can hold, which a forged object id
        # may have. With equality Django finds nothing.
        rows_of_key = Q(*(("pk", value) for value in values), _connector=Q.OR)
        field = identities[0].options.key
        if key is not None and field is not None:
            rows_of_key &= Q(**{field.attname: key})
        condition |= rows_of_key
    return condition


def _parts(rows_by_shard: Iterable[tuple[Shard, Any]], outages: Outages) -> tuple[Part, ...]:
    """Count the rows of each shard; shards without any have no part."""
    parts: list[Part] = []
    for shard, rows in rows_by_shard:
        if outages.is_lost(shard):
            continue
        try:
            count = rows.count()
        except (Error, ShardedOrmError) as error:
            outages.add(shard, error)
            continue
        if count:
            parts.append(Part(shard, rows, count))
    return tuple(parts)
