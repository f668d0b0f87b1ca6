"""Unique indexes: one entity at most has certain values.

Invariant: as long as a committed entity has the values of a unique index, the index has its row. So
the row is written before the entity, and within the transaction of the entity it is found to be there
still. Until then, it is a mere reservation.

A row is taken from an entity only under the lock of that entity, which shows that it does not have the
values, and that no transaction is about to give them to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import IntegrityError, OperationalError, connections, transaction
from django.db.models import F

from sharded_orm import unbound
from sharded_orm.backends.fence import is_deadlock
from sharded_orm.contrib.entities.exceptions import (
    EntityDamaged,
    ReservationRefused,
    UniqueValueTaken,
)
from sharded_orm.contrib.entities.index_rows import (
    IndexRow,
    alias_of,
    instance_of,
    raise_version,
    rows_from,
    same_rows,
)
from sharded_orm.models.moves.confirmation import in_transaction
from sharded_orm.models.moves.repetition import repeated

if TYPE_CHECKING:
    from sharded_orm.contrib.entities.index import Index
    from sharded_orm.contrib.entities.store import DataStore

#: How often a reservation is tried, if others take and give up the same values meanwhile, and how
#: often a transaction is run that ends in deadlocks.
ATTEMPTS = 5
R = TypeVar("R")


def reserve(index: Index, row: IndexRow) -> None:
    """Insert ``row`` into a unique index, unless another entity has its values.

    Committed at once, unless the caller is in a transaction on the shard of the row. Costs one statement, and
    about six more if another entity seems to have the values.

    :raises UniqueValueTaken: another entity has them.
    """
    _repeated(index.group, partial(_reserve, index, row))


def _reserve(index: Index, row: IndexRow) -> None:
    alias = _alias_of_row(index, row)
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
                raise taken(
                    index,
                    row,
                    f"entity {holder.entity_id} has them, or gives them up in a transaction that is not"
                    " committed yet. Commit that change first",
                )
    raise taken(index, row, "other entities get them all the time")


def write_reserved(
    store: DataStore, rows: Sequence[tuple[Index, IndexRow]], write: Callable[[], None]
) -> None:
    """Call ``write``, which writes an entity of ``store``, with these rows of unique indexes.

    :param rows: they have the id and the shard key of the entity.
    :param write: it is called again if the transaction was rolled back.
    :raises UniqueValueTaken: another entity has the values of one of ``rows``.
    :raises ReservationRefused: a row would be committed later than the entity, or not at all.
    """
    _repeated(store.group, partial(_write_reserved, store, rows, write))


def _write_reserved(
    store: DataStore, rows: Sequence[tuple[Index, IndexRow]], write: Callable[[], None]
) -> None:
    alias = store.alias_of(rows[0][1].entity_id, rows[0][1].key)
    for index, row in rows:
        if _commits_apart(_alias_of_row(index, row), alias):
            raise ReservationRefused(
                f"Entity {row.entity_id} cannot be put here: its row of the unique index {index.label!r} is on"
                f" {_alias_of_row(index, row)!r}, whose open transaction is committed apart from that of"
                f" {alias!r}. Put it outside of the transaction, or use"
                f" sharded_orm.atomic({index.group!r}, two_phase=True) if both are in that group."
            )
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
    """Return whether ``row`` is still there. One statement.

    The caller holds the lock of the entity, so nobody can begin to take the row away until the end of its
    transaction. Whoever has begun before may not have committed yet, so the row is locked.
    """
    rows = same_rows(index, row.values, row.entity_id)
    if _locks_rows(_alias_of_row(index, row)):
        return bool(rows.update(version=F("version")))
    # On SQLite, two writers would wait for each other if each wrote to the other's shard.
    return bool(rows.exists())


def take_away(index: Index, row: IndexRow) -> bool:
    """Remove ``row`` if its entity does not have these values. Return whether it does not.

    A writer that has reserved the values for the entity just now does not find the row any more, and
    reserves them again. Returns False, too, if the row would be removed while a change that gives the values
    up is not committed: the change may be rolled back.
    """
    return _repeated(index.store.group, partial(_take_away, index, row))


def _take_away(index: Index, row: IndexRow) -> bool:
    alias, alias_of_entity = _alias_of_row(index, row), index.store.alias_of(row.entity_id, row.key)
    if _commits_apart(alias_of_entity, alias):
        return False
    if not _locks_rows(alias) and _commits_apart(alias, alias_of_entity):
        return False  # A writer that confirms its reservation would not wait for the commit.
    with unbound(), index.store.locked_values(row.entity_id, row.key) as state:
        if isinstance(state, EntityDamaged):
            return False
        if state is not None and index.is_current(state, row.values):
            return False
        same_rows(index, row.values, row.entity_id).filter(version=row.version).delete()
        return True


def _repeated(group: str, work: Callable[[], R]) -> R:
    """Return the result of ``work``. Call it again if a transaction of its own was rolled back by others.

    That is by a deadlock, as of two claims of one value on MariaDB, or by a move of a key or a shard. In a
    transaction of the caller on ``group``, nothing is repeated.

    :param work: nothing is wrong if it is called again after a part of it was committed.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return repeated(group, work)
        except OperationalError as exc:
            if not is_deadlock(exc) or in_transaction(group):
                raise
    return repeated(group, work)


def taken(index: Index, row: IndexRow, why: str) -> UniqueValueTaken:
    values = dict(zip(index.names, row.values, strict=True))
    return UniqueValueTaken(
        f"Entity {row.entity_id} cannot have {values!r} in the unique index {index.label!r}: {why}."
    )


def _alias_of_row(index: Index, row: IndexRow) -> str:
    return alias_of(index, row.values[index.names.index(index.shard_on)])


def _locks_rows(alias: str) -> bool:
    return bool(connections[alias].features.has_select_for_update)


def _commits_apart(alias: str, other: str) -> bool:
    """Whether a transaction of the caller is open on ``alias``, and it is not committed with ``other``."""
    connection: Any = connections[alias]
    # A shard joins the transaction of its group when it is asked for its blocks.
    blocks = connection.atomic_blocks
    if not blocks and connection.get_autocommit():
        return False
    if alias == other or (blocks and all(block._from_testcase for block in blocks)):
        return False
    return not (connection.in_two_phase and connection.shard.group == _group_of(other))


def _group_of(alias: str) -> str:
    connection: Any = connections[alias]
    return str(connection.shard.group)
