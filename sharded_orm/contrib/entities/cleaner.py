"""The cleaner, which repairs the index rows of entities after a writer has died (FriendFeed, FF6).

Each ``put()`` of an entity also marks it, in the same transaction, so the mark is found even if the
transaction commits late. Marked entities are cleaned first, starting with the newest. Then the
cleaner goes through all entities and all rows of indexes (:mod:`.whole_pass`).

Any number of cleaners may run. Two cleaners of one shard do no harm. The lease that each takes only
prevents double work.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.utils import timezone

from sharded_orm import runtime, unbound
from sharded_orm.contrib.entities import index_states
from sharded_orm.contrib.entities.clean_report import CleanReport
from sharded_orm.contrib.entities.settlement import compare, settle
from sharded_orm.contrib.entities.shard_lease import leased
from sharded_orm.contrib.entities.store import DataStore, stores
from sharded_orm.contrib.entities.stored_entity import (
    BATCH,
    StoredEntity,
    columns_of,
    rows_of,
    stored_entities,
)
from sharded_orm.contrib.entities.whole_pass import WholePart, clean_whole, whole_parts
from sharded_orm.operations.runs.lease import Lease

#: The cleaner skips entities that were marked less than this number of seconds ago: their writers are
#: probably still writing the index rows.
MIN_AGE = 0.2
#: Seconds until a part of the pass over all entities is tried again, if its shard did not answer.
RETRY_AFTER = 10.0


def clean_marked(
    report: CleanReport,
    *,
    only: DataStore | None = None,
    min_age: float = MIN_AGE,
    stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Repair the index rows of marked entities (whose rows may be wrong), on all shards of all stores.

    Costs one query for each shard without marked entities. A shard that does not answer, or on
    which another cleaner works, is left out.

    :param only: the only store to clean; None for all stores.
    :param min_age: entities that were marked less than this number of seconds ago are skipped:
        their writers are probably still writing the index rows.
    :param stopping: returns True if the cleaner is to stop after its batch.
    """
    for store in list(stores.values()) if only is None else [only]:
        for shard in runtime.group(store.group).shards():
            if stopping():
                return
            with report.shard(shard.alias):
                if _marked_rows(store, shard.alias, min_age).exists():
                    with leased(f"{store.name} {shard.alias}") as lease:
                        _clean_shard(store, shard.alias, min_age, stopping, lease, report)


def _clean_shard(
    store: DataStore,
    alias: str,
    min_age: float,
    stopping: Callable[[], bool],
    lease: Lease,
    report: CleanReport,
) -> None:
    oldest: Any = None
    same_time: list[int] = []
    while not stopping():
        lease.check()
        with unbound():
            rows = _marked_rows(store, alias, min_age).order_by("-marked_at")
            if oldest is not None:
                # "lte" and not "lt": more entities may have been marked at the same moment as the
                # last one that was read. Entities that were already read are excluded.
                rows = rows.filter(marked_at__lte=oldest).exclude(pk__in=same_time)
            found = list(rows.values_list(*columns_of(store), "marked_at")[:BATCH])
        if not found:
            return
        if found[-1][-1] != oldest:
            oldest, same_time = found[-1][-1], []
        same_time += [row[0] for row in found if row[-1] == oldest]
        clean_batch(store, alias, stored_entities(store, found, report), report)


def clean_batch(
    store: DataStore, alias: str, entities: Sequence[StoredEntity], report: CleanReport
) -> None:
    """Repair the index rows of marked ``entities``, then remove the marks."""
    failed: set[UUID] = set()
    for index in store.indexes:
        if not index_states.is_written(index):
            continue
        settlement = compare(index, entities)
        settle(index, settlement)
        report.written += sum(map(len, settlement.missing.values()))
        report.removed += sum(map(len, settlement.left_over.values()))
        failed |= {*settlement.failures}
        for entity_id, exc in settlement.failures.items():
            report.add_problem(f"entity {entity_id}, index {index.label}: {exc}")
    settled = [entity for entity in entities if entity.id not in failed]
    take_off_marks(store, alias, settled)
    report.settled += len(settled)
    report.failed += len(failed)


def take_off_marks(store: DataStore, alias: str, entities: Sequence[StoredEntity]) -> None:
    """Remove the marks of ``entities``, unless they have changed meanwhile.

    A deleted entity has no index rows any more, so its row in the table of entities is deleted too.
    Costs one statement for each version number among the entities.
    """
    by_version: dict[tuple[bool, int], list[int]] = defaultdict(list)
    for entity in entities:
        by_version[entity.is_deleted, entity.version].append(entity.pk)
    for (is_deleted, version), pks in sorted(by_version.items()):
        with unbound():
            rows = rows_of(store, alias).filter(pk__in=sorted(pks), version=version)
            if is_deleted:
                rows.delete()
            else:
                rows.update(marked_at=None, pending=None)


def clean_once(report: CleanReport, stopping: Callable[[], bool]) -> None:
    """Repair the index rows of all entities: of marked entities first, then after a comparison of all."""
    clean_marked(report, min_age=0, stopping=stopping)
    # The errors so far are dropped, because the last step cleans the same entities once more.
    report.failed, report.problems = 0, []
    for _ in clean_whole(whole_parts(), report, stopping):
        pass
    clean_marked(report, min_age=0, stopping=stopping)


def _marked_rows(store: DataStore, alias: str, min_age: float) -> Any:
    with unbound():
        rows = rows_of(store, alias).filter(marked_at__isnull=False)
        if min_age:
            # The clock of a writer may be ahead. So entities that seem to be marked in the future
            # are cleaned as well, and not left to their writers.
            now, age = timezone.now(), timedelta(seconds=min_age)
            rows = rows.exclude(marked_at__range=(now - age, now + age))
        return rows


class ContinuousCleaner:
    """Repairs index rows in rounds until it is stopped.

    Each round repairs the rows of marked entities. From time to time, all entities are compared.

    :param interval: seconds between two rounds.
    :param whole_every: seconds between the end of one pass over all entities and the start of the
        next.
    :param retry_after: seconds until parts of the pass are tried again whose shards, or the global
        database, did not answer.
    """

    def __init__(
        self,
        interval: float,
        whole_every: float,
        stopping: Callable[[], bool],
        *,
        retry_after: float = RETRY_AFTER,
    ) -> None:
        self._interval, self._whole_every, self._stopping = interval, whole_every, stopping
        self._retry_after = retry_after
        self._report = CleanReport()
        self._whole: Generator[None, None, list[WholePart]] | None = None
        self._is_whole = False  # or what failed before
        self._next_whole = self._next_retry = time.monotonic()
        self._failed: list[WholePart] = []

    def round(self) -> CleanReport:
        """Clean marked entities, then continue the pass over all entities until the interval is over.

        :returns: the work that was done since the last call.
        """
        until = time.monotonic() + self._interval
        clean_marked(self._report, stopping=self._stopping)
        if self._whole is None and (parts := self._due_parts()):
            self._whole = clean_whole(parts, self._report, self._stopping)
        while self._whole is not None and not self._stopping() and time.monotonic() < until:
            try:
                next(self._whole)
            except StopIteration as end:
                self._whole, self._failed = None, end.value
                self._next_retry = time.monotonic() + self._retry_after
                if self._is_whole:
                    self._next_whole = time.monotonic() + self._whole_every
        return self._report.take()

    def _due_parts(self) -> list[WholePart]:
        """Return the parts that are to be compared now: all parts, the failed parts, or none yet."""
        now = time.monotonic()
        # The whole pass begins on time, even if some parts have failed again and again: a shard that
        # never answers must not keep the cleaner from the other parts.
        self._is_whole = now >= self._next_whole
        if self._is_whole:
            return whole_parts()
        return self._failed if now >= self._next_retry else []

    def close(self) -> None:
        """Release the lease of the shard that the pass over all entities has reached."""
        if self._whole is not None:
            self._whole.close()
