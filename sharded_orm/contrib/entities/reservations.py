"""Unique indexes: one entity at most has certain values.

Invariant: as long as a committed entity has the values of a unique index, the index has its row. So
the row is written before the entity, and within the transaction of the entity it is found to be there
still. Until then, it is a mere reservation.

A row is taken from an entity only under the lock of that entity, which shows that it does not have the
values, and that no transaction is about to give them to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from django.db import IntegrityError, connections, transaction

from sharded_orm.contrib.entities.exceptions import EntityDamaged, UniqueValueTaken
from sharded_orm.contrib.entities.index_rows import (
    IndexRow,
    alias_of,
    instance_of,
    raise_version,
    rows_from,
    same_rows,
)
from sharded_orm.models.sharding.bound_key import unbound

if TYPE_CHECKING:
    from sharded_orm.contrib.entities.index import Index

#: How often a reservation is tried, if others take and give up the same values meanwhile.
ATTEMPTS = 5


def reserve(index: Index, row: IndexRow) -> None:
    """Insert ``row`` into a unique index, unless another entity has its values.

    Committed at once, unless the caller is in a transaction on the shard of the row. Costs one statement, and
    about six more if another entity seems to have the values.

    :raises UniqueValueTaken: another entity has them.
    """
    alias = alias_of(index, row.values[index.names.index(index.shard_on)])
    for _ in range(ATTEMPTS):
        try:
            with unbound(), transaction.atomic(using=alias):
                instance_of(index, row).save(force_insert=True)
            return
        except IntegrityError:
            pass
        for holder in rows_from(index, same_rows(index, row.values)):
            if holder.entity_id == row.entity_id:
                raise_version(index, row)
                return
            if not take_away(index, holder):
                raise taken(index, row, f"entity {holder.entity_id} has them")
    raise taken(index, row, "other entities get them all the time")


def write_reserved(
    rows: Sequence[tuple[Index, IndexRow]], alias: str, write: Callable[[], None]
) -> None:
    """Call ``write``, which writes an entity on the shard ``alias``, with these rows of unique indexes.

    :raises UniqueValueTaken: another entity has the values of one of ``rows``.
    """
    for _ in range(ATTEMPTS):
        for index, row in rows:
            reserve(index, row)
        try:
            with transaction.atomic(using=alias):
                write()
                for index, row in rows:
                    if not _confirm(index, row):
                        raise _ReservationLost
            return
        except _ReservationLost:
            pass
    index, row = rows[0]
    raise taken(index, row, "other entities get them all the time")


class _ReservationLost(Exception):
    """Another entity, or the cleaner, has taken a reservation away. It may be made again."""


def _confirm(index: Index, row: IndexRow) -> bool:
    """Return whether ``row`` is still there. One query.

    The caller holds the lock of the entity, so nobody can take the row away until the end of its transaction.
    A read is enough then. On SQLite, two writers would wait for each other if each wrote to the other's shard.
    """
    rows = same_rows(index, row.values, row.entity_id)
    connection = connections[rows.db]
    if connection.in_atomic_block and connection.features.has_select_for_update:
        rows = (
            rows.select_for_update()
        )  # The snapshot of the transaction may be older than the lock.
    return rows.values_list("version").first() is not None


def take_away(index: Index, row: IndexRow) -> bool:
    """Remove ``row`` if its entity does not have these values. Return whether it does not.

    A writer that has reserved the values for the entity just now does not find the row any more, and
    reserves them again.
    """
    with unbound(), index.store.locked_values(row.entity_id, row.key) as state:
        if isinstance(state, EntityDamaged):
            return False
        if state is not None and index.is_current(state, row.values):
            return False
        same_rows(index, row.values, row.entity_id).filter(version=row.version).delete()
        return True


def taken(index: Index, row: IndexRow, why: str) -> UniqueValueTaken:
    values = dict(zip(index.names, row.values, strict=True))
    return UniqueValueTaken(
        f"Entity {row.entity_id} cannot have {values!r} in the unique index {index.label!r}: {why}."
    )
