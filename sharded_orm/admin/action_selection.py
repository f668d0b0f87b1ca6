"""The rows that an action is about, shard by shard."""

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
    """Rows of one shard: a queryset that names it, and how many there are."""

    shard: Shard
    rows: Any
    count: int

    @property
    def alias(self) -> str:
        return self.shard.alias


@dataclass(frozen=True)
class ActionSelection:
    """The rows that were chosen, by shard; ``outages``: the shards that did not say how many.

    ``whole`` is one queryset of all of them. ``unknown``: how many names led to no row here.
    ``left``: by alias, how many rows were left out because their keys lead to other shards.
    """

    parts: tuple[Part, ...]
    outages: Outages
    whole: Any
    unknown: int = 0
    left: Mapping[str, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(part.count for part in self.parts)


def select(
    options: ShardOptions, queryset: Any, names: Iterable[str], within: Shard | None
) -> ActionSelection:
    """The rows of ``queryset`` with these object ids.

    Names that are forged, or out of date, lead to no row, and so do those of misplaced rows. One
    count per shard; where primary keys alone are the names, one query more for their keys.

    :param within: the shard of the page, which only its own rows are selected on. A primary key
        is name enough there, as in pages of actions that were written for Django's admin.
    """
    by_shard: dict[Shard, list[Identity]] = {}
    unknown = 0
    for name in dict.fromkeys(names):
        try:
            found = parse(options, name, within)
        except InvalidObjectID:
            unknown += 1
            continue
        # What lies where its key does not lead must not be written.
        if found.misplaced or (within is not None and found.shard != within):
            unknown += 1
            continue
        by_shard.setdefault(found.shard, []).append(found)
    told = options.tells(options.model._meta.pk)  # An id leads to where its row belongs.
    outages = Outages()
    everyone = Q()
    wanted: dict[Shard, tuple[Any, int]] = {}
    for shard, found_here in sorted(by_shard.items(), key=lambda item: item[0].number):
        condition = _are(found_here)
        if not told and any(one.key is None for one in found_here):
            try:
                elsewhere = misplaced(options, queryset.using(shard.alias).filter(condition), shard)
            except (Error, ShardedOrmError) as error:
                outages.add(shard, error)
                continue
            if elsewhere is not None:
                condition &= ~elsewhere
        # Another shard may have a copy of these rows, which a move has left.
        everyone |= condition & Q(OnShard(shard.alias))
        wanted[shard] = queryset.using(shard.alias).filter(condition), len(found_here)
    parts = _counted(((shard, rows) for shard, (rows, _) in wanted.items()), outages)
    silent = outages.errors
    sought = sum(number for shard, (_, number) in wanted.items() if shard.alias not in silent)
    unknown += sought - sum(part.count for part in parts)
    whole = queryset.filter(everyone) if wanted else queryset.none()
    return ActionSelection(parts, outages, whole, unknown)


def select_all(options: ShardOptions, queryset: Any, shards: Iterable[Shard]) -> ActionSelection:
    """All rows of ``queryset``, on each of ``shards``, but for misplaced ones.

    One count per shard, and what :func:`misplaced.misplaced` costs.
    """
    outages = Outages()
    found: dict[Shard, Any] = {}
    left: dict[str, int] = {}
    own = Q()
    for shard in shards:
        if outages.is_lost(shard):
            continue
        rows = queryset.using(shard.alias)
        here = Q(OnShard(shard.alias))
        try:
            elsewhere = misplaced(options, rows, shard)
            if elsewhere is not None:
                left[shard.alias] = rows.filter(elsewhere).count()
                rows, here = rows.exclude(elsewhere), here & ~elsewhere
        except (Error, ShardedOrmError) as error:
            outages.add(shard, error)
            continue
        found[shard] = rows
        own |= here
    parts = _counted(found.items(), outages)
    return ActionSelection(parts, outages, queryset.filter(own) if left else queryset, left=left)


def _are(identities: list[Identity]) -> Q:
    """Whether a row is one of these: by its primary key, and its shard key where that is said."""
    pks: dict[Any, list[Any]] = {}
    for identity in identities:
        pks.setdefault(identity.key, []).append(identity.pk)
    condition = Q()
    for key, values in pks.items():
        # Not pk__in: SQLite fails with a number that no column can hold, which a forged name may
        # have. By equality Django finds nothing.
        one = Q(*(("pk", value) for value in values), _connector=Q.OR)
        field = identities[0].options.key
        if key is not None and field is not None:
            one &= Q(**{field.attname: key})
        condition |= one
    return condition


def _counted(wanted: Iterable[tuple[Shard, Any]], outages: Outages) -> tuple[Part, ...]:
    parts: list[Part] = []
    for shard, rows in wanted:
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
