"""Compares all entities with all index rows, and repairs the rows.

Usually a cleaner only looks at marked entities. But an index row may be wrong although its entity
has no mark, for example if a writer has written the row very late, or if somebody has changed it by
SQL. To find such rows, the pass in this module looks at all entities and index rows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.utils import timezone

from sharded_orm import runtime, unbound
from sharded_orm.contrib.entities import index_rows, index_states, reservations
from sharded_orm.contrib.entities.clean_report import CleanReport
from sharded_orm.contrib.entities.entity import Entity
from sharded_orm.contrib.entities.index import Index, follows
from sharded_orm.contrib.entities.index_repair import compare, is_outage
from sharded_orm.contrib.entities.index_rows import IndexRow
from sharded_orm.contrib.entities.store import DataStore, stores
from sharded_orm.contrib.entities.stored_entity import BATCH, entity_batches, rows_of
from sharded_orm.operations.runs.work_lease import leased

#: The kind of the leases by which a cleaner keeps other cleaners from the same work.
LEASE = "entities clean"


@dataclass(frozen=True)
class WholePart:
    """A part of the cleaner's pass over all entities and index rows.

    A part consists of all entities of a store on one shard, or of all rows of an index on one
    shard.

    :param index: the index whose rows are compared; None for the entities of the store.
    """

    store: DataStore
    index: Index | None
    alias: str

    def clean(self, report: CleanReport) -> Iterator[int]:
        """Repair this part. For a part of entities, mark those that lack index rows. For a part of
        index rows, remove stale ones. Yields after each batch.
        """
        if self.index is None:
            written = [index for index in self.store.indexes if index_states.is_written(index)]
            return mark_lacking(self.store, written, rows_of(self.store, self.alias), report)
        return remove_stale(self.index, self.alias, report)

    @property
    def subject(self) -> str:
        """The name of this part in its lease, which a cleaner holds while it works on the part."""
        if self.index is None:
            return f"{self.store.name} {self.alias} all"
        return f"{self.index.label} {self.alias}"


def whole_parts() -> list[WholePart]:
    """Return the parts of the cleaner's pass over all stores. For each store, the list has the
    parts with its entities, and then those with the rows of its indexes.
    """
    parts = []
    for store in stores.values():
        for index in (None, *filter(index_states.is_written, store.indexes)):
            group = store.group if index is None else index.group
            parts += [
                WholePart(store, index, shard.alias) for shard in runtime.group(group).shards()
            ]
    return parts


def clean_whole(
    parts: Sequence[WholePart], report: CleanReport, stopping: Callable[[], bool]
) -> Generator[None, None, list[WholePart]]:
    """Compare and repair the entities and index rows of ``parts``. Yield after each batch.

    If an entity lacks index rows, it is marked, so that the next cleaning of marked entities writes
    the rows. If an index row does not match its entity, the row is removed. A part on which another
    cleaner works is skipped.

    :returns: the parts that failed, because a shard or the global database did not answer.
    """
    failed = []
    for part in parts:
        with report.shard(part.alias) as outcome, leased(LEASE, part.subject) as lease:
            for _ in part.clean(report):
                yield
                if stopping():
                    return []
                lease.check()
        if outcome.has_failed:
            failed.append(part)
    return failed


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
    """Return those of ``rows`` whose entity was deleted, or has other properties now."""
    states = index.store.load({row.entity_id: row.key for row in rows})
    stale = []
    for row in rows:
        state = states.get(row.entity_id)
        if state is None or (isinstance(state, Entity) and not index.is_current(state, row.values)):
            stale.append(row)
    return stale


def mark_lacking(
    store: DataStore, indexes: Sequence[Index], rows: Any, report: CleanReport
) -> Iterator[int]:
    """Mark entities that lack index rows. The cleaner writes the rows of marked entities later.

    Yield the number of newly marked entities of each batch.

    :param rows: a queryset of the entities to compare.
    :raises django.db.OperationalError: at the end, if a shard of an index did not answer.
    """
    outage: Exception | None = None
    for entities in entity_batches(store, rows.filter(marked_at=None), report):
        report.compared += len(entities)
        lacking: set[UUID] = set()
        for index in indexes:
            settlement = compare(index, entities)
            for missing in settlement.missing.values():
                lacking |= {row.entity_id for row in missing}
            for exc in settlement.failures.values():
                report.add_problem(f"index {index.label}: {exc}")
                outage = exc if is_outage(exc) else outage
        marked = 0
        for entity in entities:
            if entity.id in lacking:
                with unbound():
                    # Do not mark an entity that was changed since it was read. If it needs other
                    # index rows now, the writer has marked it.
                    row = store.row_of(entity.pk, entity.key).filter(version=entity.version)
                    marked += row.filter(marked_at=None).update(marked_at=timezone.now())
        yield marked
    if outage is not None:
        raise outage


def remove_stale(index: Index, alias: str, report: CleanReport) -> Iterator[int]:
    """Remove those rows of an index on a shard that do not match their entities.

    Yield the number of removed rows of each batch.
    """
    for rows in index_row_batches(index, alias):
        report.compared += len(rows)
        stale = stale_rows(index, rows)
        if index.unique:
            removed = sum(reservations.take_away(index, row) for row in stale)
        else:
            # The entity may have been stored again since it was read, and may need the row now.
            # Then its write has raised the row's version, and remove_rows() keeps the row.
            removed = index_rows.remove_rows(index, stale)
        report.removed += removed
        yield removed
