"""Repairs rows of indexes: writes missing rows, and removes rows that no entity needs any more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db import InterfaceError, OperationalError, ProgrammingError

from sharded_orm.contrib.entities import index_rows, reservations
from sharded_orm.contrib.entities.index_rows import IndexRow
from sharded_orm.contrib.entities.stored_entity import StoredEntity

if TYPE_CHECKING:
    from sharded_orm.contrib.entities.index import Index


@dataclass
class Settlement:
    """The differences between entities and the rows of an index.

    :param missing: maps the alias of a shard to the rows to be inserted there.
    :param at_risk: maps the alias of a shard to rows that are correct, but have a lower version
        number than their entity. Another cleaner that has read an earlier version of the entity
        could remove them. To prevent this, their version number is raised to that of the entity.
    :param left_over: maps the alias of a shard to the rows to be removed there.
    :param failures: maps the id of each entity whose rows could not be read or written to the
        error.
    """

    missing: dict[str, list[IndexRow]] = field(default_factory=lambda: defaultdict(list))
    at_risk: dict[str, list[IndexRow]] = field(default_factory=lambda: defaultdict(list))
    left_over: dict[str, list[IndexRow]] = field(default_factory=lambda: defaultdict(list))
    failures: dict[UUID, Exception] = field(default_factory=dict)


def compare(index: Index, entities: Sequence[StoredEntity]) -> Settlement:
    """Compare ``entities`` with the rows of ``index`` on all shards that may have such rows.

    Return the differences. The entities were read earlier than the rows. If a row has a higher
    version than its entity, the entity was written again in between, so the row is left as it is.

    Costs a query of each shard that may have rows.
    """
    settlement = Settlement()
    at = index.names.index(index.shard_on)
    wanted: dict[UUID, tuple[Any, ...] | None] = {}
    former: dict[UUID, set[tuple[Any, ...]]] = {}
    keys: dict[Any, list[UUID]] = defaultdict(list)
    for entity in entities:
        values = wanted[entity.id] = index.values_of(entity.stored)
        former[entity.id] = entity.pending.of(index)
        for key in {some[at] for some in (*former[entity.id], values) if some is not None}:
            keys[key].append(entity.id)
    aliases, unplaced = index_rows.aliases_of(index, keys)
    for key, exc in unplaced.items():
        settlement.failures.update(dict.fromkeys(keys[key], exc))
    present = _present(index, keys, aliases, settlement)
    for entity in entities:
        if entity.id in settlement.failures:
            continue
        values = wanted[entity.id]
        rows = {row.values: row for row in present.get(entity.id, ())}
        if values is not None:
            there = rows.pop(values, None)
            row = IndexRow(values, entity.id, entity.key, entity.version)
            if there is None:
                settlement.missing[aliases[values[at]]].append(row)
            elif values in former[entity.id] and there.version < entity.version:
                settlement.at_risk[aliases[values[at]]].append(row)
        for row in rows.values():
            if row.version <= entity.version:
                settlement.left_over[aliases[row.values[at]]].append(row)
    return settlement


def settle(index: Index, settlement: Settlement) -> None:
    """Write and remove the rows in ``settlement``.

    Raise no error if this fails for a row, or if a shard does not answer. Record the error in
    ``settlement.failures``, and go on with the next row or shard.
    """
    for rows in settlement.missing.values():
        if index.unique:
            _each(rows, settlement, partial(reservations.reserve, index))
        elif not _succeeds(partial(index_rows.insert_missing, index, rows)):
            _each(rows, settlement, partial(index_rows.insert, index))
    for rows in settlement.at_risk.values():
        if not _succeeds(partial(index_rows.raise_versions, index, rows)):
            _each(rows, settlement, partial(index_rows.insert, index))
    for rows in settlement.left_over.values():
        if not _succeeds(partial(index_rows.remove_rows, index, rows)):
            _each(
                rows,
                settlement,
                lambda row: index_rows.remove(index, row.values, row.entity_id, up_to=row.version),
            )


def _succeeds(work: Callable[[], Any]) -> bool:
    """Call ``work``, which changes many rows. Return False if it raises an error or returns False.

    The caller then does the work row by row, which shows which row has the error.
    """
    try:
        return work() is not False
    except Exception:
        return False


def _each(rows: Iterable[IndexRow], settlement: Settlement, work: Any) -> None:
    """Call ``work`` for each row, and record the errors in ``settlement``.

    All rows must be on one shard. If the shard does not answer, ``work`` is not called for the
    remaining rows; the same error is recorded for them.
    """
    outage: Exception | None = None
    for row in rows:
        if outage is not None:
            settlement.failures[row.entity_id] = outage
            continue
        try:
            work(row)
        except Exception as exc:  # The error is recorded, so that the other rows are still written.
            settlement.failures[row.entity_id] = exc
            if is_outage(exc):
                outage = exc


def is_outage(exc: Exception) -> bool:
    """Whether an error concerns a whole server or table, so that all other rows would fail, too.

    True if the server does not answer, a table is missing, or a lock was not free in time. False if
    the error is about one row, such as a value that another entity has.
    """
    return isinstance(exc, OperationalError | InterfaceError | ProgrammingError)


def _present(
    index: Index,
    keys: Mapping[Any, Sequence[UUID]],
    aliases: Mapping[Any, str],
    settlement: Settlement,
) -> dict[UUID, list[IndexRow]]:
    """Return the stored index rows of entities, keyed by entity id. One query for each shard.

    :param keys: maps each value of the property ``shard_on`` to the ids of the entities that may
        have rows with this value.
    :param aliases: maps these values to the aliases of their shards.
    :param settlement: gets an error for each entity whose rows cannot be read.
    """
    present: dict[UUID, list[IndexRow]] = defaultdict(list)
    keys_by_alias: dict[str, set[Any]] = defaultdict(set)
    for key, alias in aliases.items():
        keys_by_alias[alias].add(key)
    for alias, there in keys_by_alias.items():
        ids = list({entity_id for key in there for entity_id in keys[key]})
        try:
            rows = index_rows.rows_on(index, alias, there, ids)
        except Exception as exc:
            settlement.failures.update(dict.fromkeys(ids, exc))
            continue
        for row in rows:
            present[row.entity_id].append(row)
    return present
