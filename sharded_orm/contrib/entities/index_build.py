"""Builds an index of entities while the site writes entities, and drops an index."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sharded_orm import runtime, unbound
from sharded_orm.contrib.entities import index_rows, index_states
from sharded_orm.contrib.entities.clean_report import CleanReport
from sharded_orm.contrib.entities.cleaner import clean_marked
from sharded_orm.contrib.entities.exceptions import StoreNotFound
from sharded_orm.contrib.entities.index import Index
from sharded_orm.contrib.entities.index_repair import compare, settle
from sharded_orm.contrib.entities.index_states import DROPPED, REMEMBERED, SERVED, WRITTEN
from sharded_orm.contrib.entities.store import stores
from sharded_orm.contrib.entities.stored_entity import entity_batches, rows_of
from sharded_orm.contrib.entities.whole_pass import index_row_batches, mark_lacking, remove_stale
from sharded_orm.models.moves.scatter import MovingKeys
from sharded_orm.operations.relations import batched
from sharded_orm.operations.runs.work_lease import leased
from sharded_orm.routing.directory import is_digest

#: When the state of an index changes, every process has read the new state after this many seconds.
LEARNED_AFTER = REMEMBERED + 1
#: A build checks the index until no rows are missing, and gives up after this number of checks. A
#: row is missing if an entity was stored by a process whose code does not declare the index yet.
MAX_PASSES = 5
#: The largest number of shard keys in one query.
KEYS = 100
#: The kind of the lease by which a build or a drop of an index keeps others from this index.
LEASE = "entities index"
#: The default share of the time in which a build works. In the remaining time the build waits, so
#: that writers find the processors and disks free.
SHARE = 0.15


@dataclass
class BuildReport:
    """The work that a build has done so far.

    :param phase: the current step, in words.
    :param entities: number of entities whose rows were written.
    :param written: number of rows that were missing.
    :param removed: number of stale rows that were removed.
    :param problems: the reasons why reads cannot use the index.
    :param damaged: sentences about entities that are in no index, because their bodies cannot be
        read.
    """

    phase: str = ""
    entities: int = 0
    written: int = 0
    removed: int = 0
    problems: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    is_served: bool = False


def find_indexes(names: Iterable[str]) -> list[Index]:
    """Return the indexes with these names, each once.

    :param names: names such as ``feed.index_user``; the name of a store means all its indexes.
    :raises StoreNotFound: no index or store has one of the names, or the store has no index.
    """
    indexes: dict[str, Index] = {}
    for name in names:
        store = stores.get(name)
        matching = _indexes_named(name) or (store.indexes if store is not None else [])
        if not matching:
            raise StoreNotFound(_unknown(name))
        indexes |= {index.label: index for index in matching}
    return list(indexes.values())


def find_index(name: str) -> Index:
    """Return the index with this name.

    :raises StoreNotFound: no index or several indexes have this name. The name of a store is not
        enough, even if the store has a single index.
    """
    matching = _indexes_named(name)
    if len(matching) == 1:
        return matching[0]
    if not matching and name in stores:
        matching = stores[name].indexes
    if not matching:
        raise StoreNotFound(_unknown(name))
    raise StoreNotFound(
        f"{name!r} names no single index. Name one of {[index.label for index in matching]!r}."
    )


def _indexes_named(name: str) -> list[Index]:
    return [i for store in stores.values() for i in store.indexes if name in (i.label, i.name)]


def _unknown(name: str) -> str:
    labels = [index.label for store in stores.values() for index in store.indexes]
    problem = (
        f"Store {name!r} has no index" if name in stores else f"No index has the name {name!r}"
    )
    return f"{problem}. The indexes are {labels!r}."


def build(
    index: Index,
    *,
    rate: float | None = None,
    share: float = SHARE,
    stopping: Callable[[], bool] = lambda: False,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[BuildReport]:
    """Write the rows of a new index for the entities that are stored already.

    First deploy the declaration of the index to all processes, so that they write its rows when
    they store entities. Then call this function. It writes the rows of the older entities, and
    compares all entities once more. If no row is missing then, reads can use the index. Until then,
    reads raise :exc:`IndexNotServed`. The function can be called again after an interruption.

    Yields after each batch. Nobody else can build or drop the index in the meantime.

    :raises OperationHeld: another process builds or drops the index.
    :param rate: the most entities or index rows per second; by default there is no limit.
    :param share: the share of the time in which the build works, above 0 and at most 1. For
        example, with 0.2 it waits four seconds after a batch of one second. If the servers are
        busy, batches take longer, and the waits are longer as well.
    :param stopping: returns True if the build is to stop after the current batch.
    :param pause: a function that waits for a number of seconds. It is called after each batch. If
        the state of the index has just changed, it is also called once at the beginning, to wait
        until all processes write rows of the index again.
    """
    with leased(LEASE, index.label) as lease:
        for report in _build(index, rate, share, stopping, pause):
            yield report
            lease.check()


def _build(
    index: Index,
    rate: float | None,
    share: float,
    stopping: Callable[[], bool],
    pause: Callable[[float], None],
) -> Iterator[BuildReport]:
    report, found = BuildReport(), CleanReport()
    paced = partial(_paced, found=found, rate=rate, share=share, pause=pause)
    state = index_states.read_state(index)
    if state == DROPPED:
        index_states.set_state(index, WRITTEN)
    # If a build was interrupted just now, some processes may still believe that the index is
    # dropped.
    if state != SERVED and (wait := _time_to_learn(index)):
        report.phase = "waiting for writers"
        yield report
        pause(wait)
        if stopping():
            return
    report.phase = "writing"
    for _ in paced(_write(index, report, found)):
        yield report
        if stopping():
            return
    report.damaged = found.damaged
    passes = 0
    while not found.problems and not report.is_served and passes < MAX_PASSES:
        passes += 1
        report.phase, lacking = "verifying", 0
        for marked in paced(_verify(index, report, found)):
            lacking += marked
            yield report
            if stopping():
                return
        if not lacking and not found.problems:
            index_states.set_state(index, SERVED)
            report.is_served = True
        else:
            clean_marked(found, only=index.store, min_age=0, stopping=stopping)
    if not report.is_served:
        report.problems = found.problems or [
            f"After {passes} passes, rows are still missing: a process that puts entities does not have the"
            " declaration of the index."
        ]
    yield report


def _time_to_learn(index: Index) -> float:
    """Return the number of seconds until every process knows the state of ``index``; 0 if each knows
    it already.
    """
    age = index_states.age(index)
    return 0.0 if age is None else max(0.0, LEARNED_AFTER - age)


def _paced(
    batches: Iterator[int],
    *,
    found: CleanReport,
    rate: float | None,
    share: float,
    pause: Callable[[float], None],
) -> Iterator[int]:
    """Yield the items of ``batches``. Wait after each batch as long as ``share`` and ``rate`` demand."""
    began, compared = time.monotonic(), found.compared
    for batch in batches:
        worked = time.monotonic() - began
        yield batch
        wait = worked / share - worked
        if rate is not None:
            wait = max(wait, (found.compared - compared) / rate - worked)
        pause(max(wait, 0))
        began, compared = time.monotonic(), found.compared


def _write(index: Index, report: BuildReport, found: CleanReport) -> Iterator[int]:
    """Write the missing index rows of all entities. Yield 0 after each batch."""
    for shard in runtime.group(index.store.group).shards():
        with found.shard(shard.alias):
            for entities in entity_batches(index.store, rows_of(index.store, shard.alias), found):
                settlement = compare(index, entities)
                settle(index, settlement)
                found.compared += len(entities)
                report.entities += len(entities)
                report.written += sum(map(len, settlement.missing.values()))
                for exc in settlement.failures.values():
                    found.add_problem(str(exc))
                yield 0


def _verify(index: Index, report: BuildReport, found: CleanReport) -> Iterator[int]:
    """Mark the entities that lack rows of the index, and remove stale rows of the index.

    Yield the number of newly marked entities after each batch.
    """
    store, moving = index.store, MovingKeys(index.store.group)
    for shard in runtime.group(store.group).shards():
        with found.shard(shard.alias):
            yield from mark_lacking(store, [index], rows_of(store, shard.alias), found)
    # Keys may have moved between shards during this pass. An entity that moved from a shard that
    # was not compared yet to one that was compared already has been missed. So compare the entities
    # of all moved keys once more.
    entries = moving.entries()
    if any(map(is_digest, entries)):
        found.add_problem(
            f"Keys of group {store.group!r} have moved meanwhile, which the directory only knows by digests,"
            " so their entities may have been missed. Build the index again while no key moves."
        )
        return
    for keys in batched(sorted(entries), KEYS):
        with unbound():
            rows: Any = store.model._default_manager.filter(**{f"{store.key_name}__in": keys})
        with found.shard(store.group):
            yield from mark_lacking(store, [index], rows, found)
    for shard in runtime.group(index.group).shards():
        with found.shard(shard.alias):
            for removed in remove_stale(index, shard.alias, found):
                report.removed += removed
                yield 0


def drop(
    index: Index,
    *,
    stopping: Callable[[], bool] = lambda: False,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[int]:
    """Stop all processes from reading and writing ``index``, then remove its rows.

    Yields the number of removed rows so far. Afterwards, remove the declaration of the index, and
    its table by ``makemigrations`` and ``migrate_shards``. Can be called again after an
    interruption. Nobody else can build or drop the index in the meantime.

    :param stopping: returns True if the drop is to stop after the current batch.
    :param pause: a function that waits for a number of seconds, until all processes know that the
        index is dropped.
    :raises OperationHeld: another process builds or drops the index.
    """
    with leased(LEASE, index.label) as lease:
        for removed in _drop(index, stopping, pause):
            yield removed
            lease.check()


def _drop(
    index: Index, stopping: Callable[[], bool], pause: Callable[[float], None]
) -> Iterator[int]:
    if index_states.read_state(index) != DROPPED:
        index_states.set_state(index, DROPPED)
    removed = 0
    yield removed
    pause(_time_to_learn(index))
    for shard in runtime.group(index.group).shards():
        for rows in index_row_batches(index, shard.alias):
            if stopping():
                return
            removed += index_rows.remove_all(index, shard.alias, rows)
            yield removed
