"""The cleaner, which repairs the index rows of entities after a writer has died (FriendFeed, FF6).

A writer stores an entity on one shard, and its index rows on others. If the writer dies in between,
index rows are missing or stale. So each ``put()`` that changes index rows also marks the entity, in
the same transaction. The cleaner looks for marked entities, the newest first, writes and removes
index rows, and removes the marks. From time to time it also compares all entities with all index
rows, marked or not (:mod:`.whole_pass`).

Any number of cleaners can run at the same time. If two cleaners work on one shard, they do no harm,
but do the same work twice. So a cleaner that finds much work on a shard takes a lease of the shard,
which keeps other cleaners away.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any
from uuid import UUID

from django.db.models import Q
from django.utils import timezone

from sharded_orm import runtime, unbound
from sharded_orm.contrib.entities import index_states, late_rows
from sharded_orm.contrib.entities.clean_report import CleanReport
from sharded_orm.contrib.entities.index import Index, follows
from sharded_orm.contrib.entities.index_repair import compare, settle
from sharded_orm.contrib.entities.index_rows import FOLLOW_TIME, IndexRow
from sharded_orm.contrib.entities.pending_rows import ends_with
from sharded_orm.contrib.entities.store import DataStore, stores
from sharded_orm.contrib.entities.stored_entity import (
    BATCH,
    StoredEntity,
    columns_of,
    rows_of,
    stored_entities,
)
from sharded_orm.contrib.entities.whole_pass import LEASE, WholePart, clean_whole, whole_parts
from sharded_orm.operations.relations import batched
from sharded_orm.operations.runs.lease import Lease
from sharded_orm.operations.runs.work_lease import leased

#: If a shard does not answer during the pass over all entities, it is tried again after this number
#: of seconds.
RETRY_AFTER = 10.0
#: An entity is marked while its index rows may be wrong. To learn which shards have marked
#: entities, the cleaner reads this number of the newest marks.
LOOK = 100
#: The largest number of version numbers in one statement. There is one OR for each version number,
#: and SQLite limits how deeply conditions are nested.
VERSIONS = 100


def clean_marked(
    report: CleanReport,
    *,
    only: DataStore | None = None,
    min_age: float = FOLLOW_TIME,
    stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Repair the index rows of marked entities, on all shards of all stores.

    An entity is marked while its index rows may be wrong. A shard is skipped if it does not answer,
    or if another cleaner is repairing many entities there.

    Cost for each store: one query per node (a database server), one per shard with marked entities,
    and a few statements per index shard with repaired rows.

    :param only: the only store to clean; None for all stores.
    :param min_age: entities that were marked less than this number of seconds ago are skipped:
        their writers are probably still writing the index rows.
    :param stopping: returns True if the cleaner is to stop after the current batch.
    """
    for store in list(stores.values()) if only is None else [only]:
        if stopping():
            return
        _clean_store(store, min_age, stopping, report)


def _clean_store(
    store: DataStore, min_age: float, stopping: Callable[[], bool], report: CleanReport
) -> None:
    # Collect the entities of several shards, and repair them together. Their index rows are on the
    # shards of the index, so this needs only one statement for each of those shards.
    entities: dict[str, list[StoredEntity]] = {}
    ids: set[UUID] = set()
    for alias in _marked_shards(store, min_age, report):
        if stopping():
            break
        with report.shard(alias):
            rows = _newest_rows(store, alias, min_age)
            if len(rows) == BATCH:
                # Take a lease (it keeps other cleaners away) only for a shard with many marked
                # entities. A lease costs as much as the repair of a hundred entities. The repair of
                # a few is over so soon that two cleaners hardly ever do it at the same time.
                with leased(LEASE, f"{store.name} {alias}") as lease:
                    _clean_backlog(store, alias, min_age, stopping, lease, report)
                continue
            if len(ids) + len(rows) > BATCH:
                clean_batch(store, entities, report)
                entities, ids = {}, set()
            # While a key moves from one shard to another, both may have a copy of an entity. Skip
            # the second copy, which stays marked and is cleaned later.
            entities[alias] = [e for e in stored_entities(store, rows, report) if e.id not in ids]
            ids |= {entity.id for entity in entities[alias]}
    clean_batch(store, entities, report)


def _clean_backlog(
    store: DataStore,
    alias: str,
    min_age: float,
    stopping: Callable[[], bool],
    lease: Lease,
    report: CleanReport,
) -> None:
    last: tuple[Any, ...] | None = None
    while not stopping():
        lease.check()
        rows = _newest_rows(store, alias, min_age, last)
        clean_batch(store, {alias: stored_entities(store, rows, report)}, report)
        if len(rows) < BATCH:
            return
        last = (rows[-1][-1], rows[-1][0])


def clean_batch(
    store: DataStore, entities: Mapping[str, Sequence[StoredEntity]], report: CleanReport
) -> None:
    """Repair the index rows of ``entities``, then remove their marks.

    An entity is marked while its index rows may be wrong.

    :param entities: maps the alias of a shard to entities of this shard.
    """
    of_all_shards = [*chain.from_iterable(entities.values())]
    if not of_all_shards:
        return
    failed: set[UUID] = set()
    written: dict[UUID, list[tuple[Index, IndexRow]]] = defaultdict(list)
    for index in store.indexes:
        if not index_states.is_written(index):
            continue
        settlement = compare(index, of_all_shards)
        settle(index, settlement)
        # Record all rows that settle() may have inserted. Rows at risk are among them, because
        # settle() inserts such a row again if another process has removed it in the meantime.
        for rows in (*settlement.missing.values(), *settlement.at_risk.values()):
            for row in rows:
                written[row.entity_id].append((index, row))
        report.written += sum(map(len, settlement.missing.values()))
        report.removed += sum(map(len, settlement.left_over.values()))
        failed |= {*settlement.failures}
        for entity_id, exc in settlement.failures.items():
            report.add_problem(f"entity {entity_id}, index {index.label}: {exc}")
    report.failed += len(failed)
    for alias, of_shard in entities.items():
        with report.shard(alias):
            settled = [entity for entity in of_shard if entity.id not in failed]
            for entity_id in take_off_marks(store, alias, settled):
                if entity_id in written:
                    late_rows.mark(written[entity_id])
            report.settled += len(settled)


def take_off_marks(store: DataStore, alias: str, entities: Sequence[StoredEntity]) -> list[UUID]:
    """Remove the marks of ``entities``, whose index rows are correct now.

    An entity keeps its mark if another process has changed it since it was read. It also keeps the
    mark if another process has written an index row late, and has therefore marked the entity
    again. Return the ids of the entities that keep their marks. If an entity is deleted, no index
    row refers to it any more, so delete its row in the table of entities.

    Costs one statement, and one more if there are deleted or changed entities or many version
    numbers.
    """
    changed: list[UUID] = []
    for is_deleted in (False, True):
        pks: dict[int, list[int]] = defaultdict(list)
        ends: set[str] = set()
        for entity in entities:
            if entity.is_deleted == is_deleted:
                pks[entity.version].append(entity.pk)
                if entity.pending.end:
                    ends.add(entity.pending.end)
        # The mark must stay if another process has added a late row to the text in the column
        # ``pending`` since the entity was read. Each late row gives the text a new random end, so
        # it is enough to compare the ends of the texts.
        same_text = Q(pending=None) | Q(ends_with(ends)) if ends else Q(pending=None)
        for versions in batched(pks, VERSIONS):
            of_versions = Q()
            for version in versions:
                of_versions |= Q(pk__in=pks[version], version=version)
            unchanged = of_versions & same_text
            with unbound():
                rows = rows_of(store, alias)
                if is_deleted:
                    rows.filter(unchanged).delete()
                    continue
                known = [pk for version in versions for pk in pks[version]]
                if rows.filter(unchanged).update(marked_at=None, pending=None) < len(known):
                    others = rows.filter(pk__in=known).exclude(unchanged)
                    changed += others.values_list("id", flat=True)
    return changed


def clean_once(report: CleanReport, stopping: Callable[[], bool]) -> None:
    """Repair the index rows of all entities, marked or not.

    First clean the marked entities. Then compare all entities with their index rows, and mark the
    entities whose index rows are missing. Finally clean the marked entities again.
    """
    clean_marked(report, min_age=0, stopping=stopping)
    # Forget the errors so far: the last step cleans the same entities once more, and reports the
    # errors that are still there.
    report.failed, report.problems = 0, []
    for _ in clean_whole(whole_parts(), report, stopping):
        pass
    clean_marked(report, min_age=0, stopping=stopping)


def _marked_shards(store: DataStore, min_age: float, report: CleanReport) -> list[str]:
    """Return the aliases of the shards that may have marked entities, newest marks first.

    An entity is marked while its index rows may be wrong. Costs one query of each node (a database
    server).
    """
    newest: list[Any] = []
    with report.shard(store.group), unbound():
        manager: Any = store.model._default_manager
        rows = _marked(manager.scatter(partial=True), min_age).order_by("-marked_at")
        rows = rows.only("added_id")[:LOOK]
        newest = list(rows)
        for alias, exc in rows.failed_shards.items():
            report.add_problem(f"{alias}: {exc}")
    aliases = dict.fromkeys(str(row._state.db) for row in newest)
    if len(newest) == LOOK:
        # There may be more marks than were read. So add all other shards, which may have older
        # marks.
        aliases |= dict.fromkeys(shard.alias for shard in runtime.group(store.group).shards())
    return list(aliases)


def _newest_rows(
    store: DataStore, alias: str, min_age: float, last: tuple[Any, ...] | None = None
) -> list[tuple[Any, ...]]:
    """Return the rows of marked entities on a shard, the newest first.

    :param last: the time of the mark, and the primary key, of the last row of the previous batch;
        None (the default) for the first batch.
    :returns: values of the columns in :func:`columns_of`, and the mark.
    """
    with unbound():
        rows = _marked(rows_of(store, alias), min_age).order_by("-marked_at", "-added_id")
        if last is not None:
            rows = rows.filter(follows(("marked_at", "added_id"), (True, True), last))
        return list(rows.values_list(*columns_of(store), "marked_at")[:BATCH])


def _marked(rows: Any, min_age: float) -> Any:
    """Return a query of those ``rows`` that were marked at least ``min_age`` seconds ago."""
    rows = rows.filter(marked_at__isnull=False)
    if min_age:
        # The clock of a writer may be ahead, so its marks seem to be in the future. Marks that are
        # more than ``min_age`` seconds ahead are cleaned as well; they would wait too long
        # otherwise.
        now, age = timezone.now(), timedelta(seconds=min_age)
        rows = rows.exclude(marked_at__range=(now - age, now + age))
    return rows


class ContinuousCleaner:
    """Repairs index rows in rounds until it is stopped.

    Each round repairs the rows of marked entities. From time to time, all entities are compared.

    :param interval: seconds between two rounds.
    :param whole_every: seconds between the end of one pass over all entities and the start of the
        next.
    :param retry_after: if a shard or the global database does not answer during a pass, the part of
        the pass that failed is tried again after this number of seconds.
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
        """Clean the marked entities, then continue the pass over all entities, marked or not, until
        the interval is over.

        The pass makes at least one step in each round, even if no time remains. Otherwise it would
        never end if there are always many marked entities.

        :returns: the work that was done since the last call.
        """
        until = time.monotonic() + self._interval
        clean_marked(self._report, stopping=self._stopping)
        if self._whole is None and (parts := self._due_parts()):
            self._whole = clean_whole(parts, self._report, self._stopping)
        while self._whole is not None and not self._stopping():
            try:
                next(self._whole)
            except StopIteration as end:
                self._whole, self._failed = None, end.value
                self._next_retry = time.monotonic() + self._retry_after
                if self._is_whole:
                    self._next_whole = time.monotonic() + self._whole_every
            if time.monotonic() >= until:
                break
        return self._report.take()

    def _due_parts(self) -> list[WholePart]:
        """Return the parts (stores and indexes on a shard) that are to be compared now.

        These are all parts if it is time for a new pass, or those that failed before if it is time
        to try them again. Otherwise there are none.
        """
        now = time.monotonic()
        # Begin a new pass on time, even if some parts of the last pass still fail. Otherwise a
        # shard that never answers would keep the other shards from being cleaned.
        self._is_whole = now >= self._next_whole
        if self._is_whole:
            return whole_parts()
        return self._failed if now >= self._next_retry else []

    def close(self) -> None:
        """End the pass over all entities, and release the lease that it holds."""
        if self._whole is not None:
            self._whole.close()
