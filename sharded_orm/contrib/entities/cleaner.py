"""The cleaner, which repairs the index rows of entities after a writer has died (FF6).

Each put marks its entity in the same transaction, so the mark is found even if the transaction
commits late. Marked entities are cleaned first, starting with the newest. Then the cleaner goes
through all entities and all rows of indexes. This finds errors of which no mark exists: rows that a
very late writer has left, and changes by SQL.

Any number of cleaners may run. Two cleaners of one shard do no harm; the lease that each takes only
spares them the double work.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db import Error

from sharded_orm import runtime, unbound
from sharded_orm.contrib.entities import index_rows, index_states, reservations
from sharded_orm.contrib.entities.entity import Entity
from sharded_orm.contrib.entities.index import Index, follows
from sharded_orm.contrib.entities.index_rows import IndexRow
from sharded_orm.contrib.entities.pending_rows import PendingRows
from sharded_orm.contrib.entities.settlement import StoredEntity, compare, settle
from sharded_orm.contrib.entities.store import BATCH, DataStore, stores
from sharded_orm.database_clock import DatabaseClock
from sharded_orm.exceptions import LeaseLost, OperationHeld, ShardedOrmError
from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.lease import Lease

KIND = "entities clean"
#: Entities that were marked less than this number of seconds ago are left to their writers.
MIN_AGE = 0.2
#: The largest number of problems that a report describes.
MAX_PROBLEMS = 100


@dataclass
class CleanReport:
    """The work that a cleaner has done.

    :param settled: number of marked entities whose index rows are right now.
    :param failed: number of marked entities with index rows that could not be written.
    :param written: number of index rows that were missing.
    :param removed: number of index rows that were left over.
    :param compared: number of entities and index rows that the pass over everything has compared.
    :param problems: sentences about shards and entities.
    :param damaged: sentences about entities whose bodies cannot be read.
    """

    settled: int = 0
    failed: int = 0
    written: int = 0
    removed: int = 0
    compared: int = 0
    problems: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    def take(self) -> CleanReport:
        """Return a copy of the report, and reset the report to zero."""
        report = replace(self)
        vars(self).update(vars(CleanReport()))
        return report

    def add_problem(self, text: str) -> None:
        if text not in self.problems and len(self.problems) < MAX_PROBLEMS:
            self.problems.append(text)


def clean_marked(
    report: CleanReport,
    *,
    only: DataStore | None = None,
    min_age: float = MIN_AGE,
    stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Repair the index rows of marked entities, on all shards of all stores.

    Costs one query for each shard without marked entities. A shard that does not answer, or on
    which another cleaner works, is left out.

    :param only: the only store to clean; None for all stores.
    :param min_age: seconds; entities that were marked later are left to their writers.
    :param stopping: returns True if the cleaner is to stop after its batch.
    """
    for store in list(stores.values()) if only is None else [only]:
        for shard in runtime.group(store.group).shards():
            if stopping():
                return
            with _reported(shard.alias, report):
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
                # Do not use "<" here: SQLite's clock writes fewer digits than Django, so it would
                # be true of equal times.
                rows = rows.filter(marked_at__lte=oldest).exclude(pk__in=same_time)
            found = list(rows.values_list(*_columns(store), "marked_at")[:BATCH])
        if not found:
            return
        if found[-1][-1] != oldest:
            oldest, same_time = found[-1][-1], []
        same_time += [row[0] for row in found if row[-1] == oldest]
        clean_batch(store, alias, stored_entities(store, found, report), report)


def clean_batch(
    store: DataStore, alias: str, entities: Sequence[StoredEntity], report: CleanReport
) -> None:
    """Make the index rows of marked ``entities`` right, then remove the marks."""
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

    The row of a deleted entity is removed now, because its index rows are gone. One statement for
    each version that occurs.
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


# ##### Going through the whole #####


def clean_whole(report: CleanReport, stopping: Callable[[], bool]) -> Generator[None]:
    """Compare all entities with all rows of indexes. Yield after each batch.

    Entities without their index rows are marked, so that :func:`clean_marked` writes the rows.
    Index rows without a matching entity are removed. Shards that do not answer, or on which another
    cleaner works, are left out.
    """
    for store in list(stores.values()):
        indexes = [index for index in store.indexes if index_states.is_written(index)]
        for shard in runtime.group(store.group).shards():
            with _reported(shard.alias, report), leased(f"{store.name} {shard.alias} all") as lease:
                for _ in mark_lacking(store, indexes, shard.alias, report):
                    yield
                    if stopping():
                        return
                    lease.check()
        for index in indexes:
            for shard in runtime.group(index.group).shards():
                subject = f"{index.label} {shard.alias}"
                with _reported(shard.alias, report), leased(subject) as lease:
                    for _ in remove_stale(index, shard.alias, report):
                        yield
                        if stopping():
                            return
                        lease.check()


def clean_once(report: CleanReport, stopping: Callable[[], bool]) -> None:
    """Clean marked entities of any age, then compare everything, then clean the newly marked entities."""
    clean_marked(report, min_age=0, stopping=stopping)
    # The errors are dropped, because the last step tries the same entities once more.
    report.failed, report.problems = 0, []
    for _ in clean_whole(report, stopping):
        pass
    clean_marked(report, min_age=0, stopping=stopping)


def entity_batches(
    store: DataStore, alias: str, report: CleanReport, *, marked: bool = True
) -> Iterator[list[StoredEntity]]:
    """Yield the entities of a shard in batches, the oldest first.

    :param marked: whether to include entities that are marked.
    """
    last = None
    while True:
        with unbound():
            rows = rows_of(store, alias).order_by("added_id")
            if last is not None:
                rows = rows.filter(added_id__gt=last)
            if not marked:
                rows = rows.filter(marked_at=None)
            found = list(rows.values_list(*_columns(store))[:BATCH])
        if not found:
            return
        last = found[-1][0]
        yield stored_entities(store, found, report)


def index_row_batches(index: Index, alias: str) -> Iterator[list[IndexRow]]:
    """Yield the rows of an index on a shard in batches, in the order of the primary key."""
    names = (*index.names, "entity_id")
    last: tuple[Any, ...] | None = None
    while True:
        with unbound():
            manager: Any = index.model._default_manager
            rows = manager.using(alias).order_by(*names)
            if last is not None:
                rows = rows.filter(follows(names, (False,) * len(names), last))
            found = index_rows.rows_from(index, rows[:BATCH])
        if not found:
            return
        last = (*found[-1].values, found[-1].entity_id)
        yield found


def stale_rows(index: Index, rows: Sequence[IndexRow]) -> list[IndexRow]:
    """Return those of ``rows`` whose entities were deleted or have other properties now."""
    states = index.store.load({row.entity_id: row.key for row in rows})
    stale = []
    for row in rows:
        state = states.get(row.entity_id)
        if state is None or (isinstance(state, Entity) and not index.is_current(state, row.values)):
            stale.append(row)
    return stale


def mark_lacking(
    store: DataStore, indexes: Sequence[Index], alias: str, report: CleanReport
) -> Iterator[int]:
    """Mark the entities of a shard that lack index rows and have no mark. Yield the number of each batch."""
    for entities in entity_batches(store, alias, report, marked=False):
        report.compared += len(entities)
        lacking: set[UUID] = set()
        for index in indexes:
            settlement = compare(index, entities)
            for rows in settlement.missing.values():
                lacking |= {row.entity_id for row in rows}
            for exc in settlement.failures.values():
                report.add_problem(f"index {index.label}: {exc}")
        marked = 0
        for entity in entities:
            if entity.id in lacking:
                with unbound():
                    # The version is a condition: if the entity has changed meanwhile, its writer
                    # has marked it.
                    rows = rows_of(store, alias).filter(pk=entity.pk, version=entity.version)
                    marked += rows.filter(marked_at=None).update(marked_at=DatabaseClock())
        yield marked


def remove_stale(index: Index, alias: str, report: CleanReport) -> Iterator[int]:
    """Remove the stale rows of an index on a shard. Yield the number of removed rows for each batch."""
    for rows in index_row_batches(index, alias):
        report.compared += len(rows)
        removed = 0
        for row in stale_rows(index, rows):
            if index.unique:
                removed += reservations.take_away(index, row)
            else:
                # If a later version of the entity has written the row again, it has a higher version.
                removed += index_rows.remove(index, row.values, row.entity_id, up_to=row.version)
        report.removed += removed
        yield removed


# ##### Reading #####


def stored_entities(
    store: DataStore, rows: Sequence[tuple[Any, ...]], report: CleanReport
) -> list[StoredEntity]:
    """Return the parts of the entities in ``rows`` that indexes need. Report entities with damaged bodies."""
    entities = []
    for pk, entity_id, version, body, pending, key, *_ in rows:
        stored = {}
        if body:
            try:
                stored = store.declared(bytes(body))
            except ValueError as exc:
                text = f"The body of entity {entity_id} in store {store.name!r} is damaged: {exc}."
                if text not in report.damaged and len(report.damaged) < MAX_PROBLEMS:
                    report.damaged.append(text)
                continue
        entities.append(
            StoredEntity(pk, entity_id, key, version, stored, PendingRows(pending), not body)
        )
    return entities


def _columns(store: DataStore) -> tuple[str, ...]:
    return ("added_id", "id", "version", "body", "pending", store.key_name)


def rows_of(store: DataStore, alias: str) -> Any:
    manager: Any = store.model._default_manager
    return manager.using(alias)


def _marked_rows(store: DataStore, alias: str, min_age: float) -> Any:
    with unbound():
        rows = rows_of(store, alias).filter(marked_at__isnull=False)
        if min_age:
            rows = rows.filter(marked_at__lte=DatabaseClock() - timedelta(seconds=min_age))
        return rows


@contextmanager
def _reported(alias: str, report: CleanReport) -> Iterator[None]:
    """Return a context manager that adds an error of a shard to the problems. The error ends the block."""
    try:
        yield
    except OperationHeld:
        pass  # Another cleaner works there.
    except LeaseLost as exc:
        report.add_problem(str(exc))
    except (Error, ShardedOrmError) as exc:
        report.add_problem(f"{alias}: {exc}")


@contextmanager
def leased(subject: str) -> Iterator[Lease]:
    """Return a context manager during which no other cleaner works on ``subject``.

    :raises OperationHeld: another cleaner works on it.
    """
    lease, _ = journal.take_lease(KIND, subject, {})
    lease.start()
    try:
        yield lease
    finally:
        try:
            # The lease is a row of the journal of operations. It is deleted, because no work has to
            # be resumed.
            lease.own_row().delete()
        finally:
            lease.release()


class ContinuousCleaner:
    """Cleans until it is stopped: marked entities in each round, all entities from time to time.

    :param interval: seconds between two rounds.
    :param whole_every: seconds between the end of one pass over all entities and the start of the
        next.
    """

    def __init__(self, interval: float, whole_every: float, stopping: Callable[[], bool]) -> None:
        self._interval, self._whole_every, self._stopping = interval, whole_every, stopping
        self._report = CleanReport()
        self._whole: Generator[None] | None = None
        self._next_whole = time.monotonic()

    def round(self) -> CleanReport:
        """Clean marked entities, then continue the pass over all entities until the interval is over.

        :returns: the work that was done since the last call.
        """
        until = time.monotonic() + self._interval
        clean_marked(self._report, stopping=self._stopping)
        if self._whole is None and time.monotonic() >= self._next_whole:
            self._whole = clean_whole(self._report, self._stopping)
        while self._whole is not None and not self._stopping() and time.monotonic() < until:
            try:
                next(self._whole)
            except StopIteration:
                self._whole = None
                self._next_whole = time.monotonic() + self._whole_every
        return self._report.take()

    def close(self) -> None:
        """Release the lease of the shard that the pass over all entities has reached."""
        if self._whole is not None:
            self._whole.close()
