"""The current status of entity stores and their indexes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from django.db import Error
from django.db.models import Count, Min
from django.utils import timezone

from sharded_orm import runtime, unbound
from sharded_orm.contrib.entities import index_rows, index_states
from sharded_orm.contrib.entities.index import Index
from sharded_orm.contrib.entities.store import DataStore, stores
from sharded_orm.contrib.entities.whole_pass import stale_rows
from sharded_orm.exceptions import ShardedOrmError


@dataclass
class StoreStatus:
    """The status of an entity store (a :class:`DataStore`).

    :param backlog: number of marked entities. A writer marks an entity whose index rows it changes,
        and a cleaner removes the mark when it has checked the rows.
    :param lag: the age of the oldest mark in seconds; 0 if there is none.
    :param problems: sentences about shards that do not answer, with the reasons.
    """

    name: str
    backlog: int = 0
    lag: float = 0.0
    problems: list[str] = field(default_factory=list)


@dataclass
class IndexStatus:
    """The status of an index.

    :param sampled: number of index rows that were drawn at random and compared with their entities.
    :param stale: number of these rows whose entity was deleted, or has other properties now.
    """

    label: str
    state: str
    is_unique: bool
    sampled: int = 0
    stale: int = 0
    problems: list[str] = field(default_factory=list)


def store_statuses() -> Iterator[StoreStatus]:
    """Yield the status of each entity store. One query for each shard of the store's group."""
    for store in stores.values():
        yield _store_status(store)


def _store_status(store: DataStore) -> StoreStatus:
    status = StoreStatus(store.name)
    manager: Any = store.model._default_manager
    for shard in runtime.group(store.group).shards():
        try:
            with unbound():
                marked = manager.using(shard.alias).filter(marked_at__isnull=False)
                totals = marked.aggregate(number=Count("added_id"), oldest=Min("marked_at"))
        except (Error, ShardedOrmError) as exc:
            status.problems.append(f"{shard.alias}: {exc}")
            continue
        status.backlog += totals["number"]
        if totals["oldest"] is not None:
            age = timezone.now() - totals["oldest"]
            status.lag = max(status.lag, age.total_seconds())
    return status


def index_statuses(*, sample: int = 0) -> Iterator[IndexStatus]:
    """Yield the statuses of all indexes.

    :param sample: number of rows of each shard, drawn at random, that are compared with their
        entities.

    Costs a query of the global database for each index, and two queries of each shard if ``sample``
    is not 0.
    """
    for store in stores.values():
        for index in store.indexes:
            status = IndexStatus(index.label, index_states.read_state(index), index.unique)
            if sample:
                _take_samples(index, sample, status)
            yield status


def _take_samples(index: Index, size: int, status: IndexStatus) -> None:
    manager: Any = index.model._default_manager
    for shard in runtime.group(index.group).shards():
        try:
            with unbound():
                # Entity ids are random, so the rows that follow a random id are a random sample.
                rows = manager.using(shard.alias).order_by("entity_id")
                behind = rows.filter(entity_id__gte=uuid.uuid4())[:size]
                sampled = index_rows.rows_from(index, behind)
                if len(sampled) < size:
                    others = index_rows.rows_from(index, rows[: size - len(sampled)])
                    sampled = list(
                        {(r.values, r.entity_id): r for r in (*sampled, *others)}.values()
                    )
            status.stale += len(stale_rows(index, sampled))
            status.sampled += len(sampled)
        except (Error, ShardedOrmError) as exc:
            status.problems.append(f"{shard.alias}: {exc}")
