"""The rows that a user has selected for an admin action, divided by shard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.db import Error
from django.db.models import Q

from sharded_orm.admin.exceptions import InvalidObjectID
from sharded_orm.admin.failures import Outages
from sharded_orm.admin.identity import Identity, parse
from sharded_orm.admin.misplaced_rows import misplaced
from sharded_orm.exceptions import ShardedOrmError
from sharded_orm.models.sharding.options import ShardOptions
from sharded_orm.routing.where_clause import OnShard
from sharded_orm.topology.model import Shard


@dataclass(frozen=True)
class Part:
    """The rows of one shard that the user has selected for an action.

    ``rows`` is a queryset of these rows, bound to the shard's alias. ``count`` is the number of
    rows.
    """

    shard: Shard
    rows: Any
    count: int

    @property
    def alias(self) -> str:
        return self.shard.alias


@dataclass(frozen=True)
class ActionSelection:
    """The rows selected for an action, on all shards together.

    :param parts: one part for each shard with selected rows.
    :param outages: the shards that failed when the selected rows were counted.
    :param queryset: all selected rows in one queryset.
    :param unknown: the number of selected object ids (see :mod:`identity`) whose rows were not
        found or are refused; see :func:`select`.
    :param misplaced: the number of misplaced rows left out on each shard, keyed by the shard's
        alias. A row is misplaced if its shard key leads to another shard.
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
    """Return the rows of ``queryset`` that have the given object ids (see :mod:`identity`).

    An object id counts as unknown if it is forged or outdated, or if its row is on another shard
    than its shard key says.

    Costs one ``COUNT`` query for each shard with selected rows. To find these shards, it also costs
    look-ups in the directory, the table that maps each shard key to its shard. If the primary key
    does not determine the shard, the queries of :func:`misplaced` are added.

    :param within: the shard that the page shows; None if the page shows several shards. If a shard
        is given, the object ids of rows on other shards count as unknown. An object id may then be
        a primary key alone, as in actions that were written for Django's own admin.
    """
    by_shard: dict[Shard, list[Identity]] = {}
    unknown = 0
    for object_id in dict.fromkeys(object_ids):
        try:
            identity = parse(options, object_id, within)
        except InvalidObjectID:
            unknown += 1
            continue
        # Refuse misplaced rows, whose shard key leads to a different shard, because no action may
        # write them. Also refuse rows of a shard that the page does not show.
        if identity.misplaced or (within is not None and identity.shard != within):
            unknown += 1
            continue
        by_shard.setdefault(identity.shard, []).append(identity)
    # If the primary key determines the shard, parse() has computed the shard of each row from the
    # primary key. A row that is found on this shard is therefore on its right shard, so the search
    # for misplaced rows (whose shard key leads to another shard) is not needed.
    pk_tells_shard = options.names_shard(options.model._meta.pk)
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
        # Restrict the condition to this shard, because another shard may hold copies of these rows,
        # left behind when their key was moved.
        all_selected |= condition & Q(OnShard(shard.alias))
        rows_by_shard[shard] = queryset.using(shard.alias).filter(condition)
    parts = _parts(rows_by_shard.items(), outages)
    answered = [shard for shard in rows_by_shard if shard.alias not in outages.errors]
    unknown += sum(len(by_shard[shard]) for shard in answered) - sum(part.count for part in parts)
    selected = queryset.filter(all_selected) if rows_by_shard else queryset.none()
    return ActionSelection(parts, outages, selected, unknown)


def select_all(options: ShardOptions, queryset: Any, shards: Iterable[Shard]) -> ActionSelection:
    """Return all rows of ``queryset`` on ``shards``, without misplaced rows.

    A row is misplaced if its shard key leads to a different shard. For each shard, costs one
    ``COUNT`` query (two if the shard has misplaced rows), and the queries of :func:`misplaced`.
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
    """Return a condition that matches the rows that ``identities`` (parsed object ids) name.

    The condition compares the primary key and, if an identity holds a shard key, also the shard key.
    """
    pks: dict[Any, list[Any]] = {}
    for identity in identities:
        pks.setdefault(identity.key, []).append(identity.pk)
    condition = Q()
    for key, values in pks.items():
        # Compare each primary key by equality, not all of them by pk__in. A forged object id may
        # hold a number that is too large for the column. With such a number, equality finds no row,
        # but pk__in fails on SQLite.
        rows_of_key = Q(*(("pk", value) for value in values), _connector=Q.OR)
        field = identities[0].options.key
        if key is not None and field is not None:
            rows_of_key &= Q(**{field.attname: key})
        condition |= rows_of_key
    return condition


def _parts(rows_by_shard: Iterable[tuple[Shard, Any]], outages: Outages) -> tuple[Part, ...]:
    """Count the rows of each shard, and return a :class:`Part` for each shard that has rows.

    A shard that fails is added to ``outages`` and left out of the result.
    """
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
