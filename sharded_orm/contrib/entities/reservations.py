"""Unique indexes: no two entities have the same values, even if they are on different shards.

A unique index has at most one row for the same values. The row names the entity that has these
values. So the row must exist before the entity is committed, and as long as the entity has the
values. A writer first inserts the row, as a reservation. Then it writes the entity, and verifies in
the same transaction that the row still exists.

A row is removed only by a process that has locked its entity, and has found that the entity does
not have the values. No transaction can give the values to the entity while it is locked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import IntegrityError, OperationalError, connections, transaction
from django.db.models import F

from sharded_orm import unbound
from sharded_orm.backends.fence_messages import is_deadlock
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

#: How often a process tries to reserve values, if other processes take and release them at the same
#: time. A transaction that ends in a deadlock is also tried so many times.
ATTEMPTS = 5
R = TypeVar("R")


def reserve(index: Index, row: IndexRow) -> None:
    """Insert ``row`` into a unique index, unless another entity has its values.

    The row is committed at once, unless the caller is in a transaction on the row's shard. Then it
    is committed with this transaction. Costs one statement, and about six more if another entity
    seems to have the values.

    :raises UniqueValueTaken: another entity has the values.
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
                    f"entity {holder.entity_id} has them. Choose other values; or, if a transaction takes them"
                    " from that entity, commit it first",
                )
    raise taken(index, row, "other entities get them all the time")


def write_reserved(
    store: DataStore, rows: Sequence[tuple[Index, IndexRow]], write: Callable[[], None]
) -> None:
    """Reserve the rows of an entity in unique indexes, then call ``write``, which writes the
    entity.

    :param rows: pairs (unique index, row of the entity in this index).
    :param write: writes the entity of ``store``. It is called again if the transaction was rolled
        back.
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
    """A row of a unique index was removed again before its entity was written.

    A writer of another entity has removed it, or the cleaner, because no entity had the values yet.
    The caller may reserve the values again.
    """


def _confirm(index: Index, row: IndexRow) -> bool:
    """Return whether the reserved ``row`` still exists. One statement.

    The caller has locked the entity, so nobody else can begin to remove the row before the caller's
    transaction ends. But a removal that began before may not be committed yet. So this also locks
    the row, which waits until such a removal is committed or rolled back.
    """
    rows = same_rows(index, row.values, row.entity_id)
    if _locks_rows(_alias_of_row(index, row)):
        return bool(rows.update(version=F("version")))
    # SQLite has no row locks, and a write would lock the whole shard. Two writers would run into a
    # deadlock if each had a transaction on the shard that the other one needs. So only read the row
    # there.
    return bool(rows.exists())


def take_away(index: Index, row: IndexRow) -> bool:
    """Remove ``row`` from a unique index, unless its entity has the values of the row.

    Another writer may have reserved the values for the entity just now. It will notice that the row
    is missing, and reserve them again.

    :returns: True if the entity does not have the values. False if it has them, or if nobody can
        tell now. This is so if the body of the entity is damaged, or if the caller has a
        transaction open on the shard of the entity or of the row, which may be rolled back.
    """
    return _repeated(index.store.group, partial(_take_away, index, row))


def _take_away(index: Index, row: IndexRow) -> bool:
    alias, alias_of_entity = _alias_of_row(index, row), index.store.alias_of(row.entity_id, row.key)
    if _commits_apart(alias_of_entity, alias):
        return False
    if not _locks_rows(alias) and _commits_apart(alias, alias_of_entity):
        # Keep the row. The caller has a transaction open on the row's shard, which is not the
        # entity's shard, and the removal would be committed only with that transaction. Before the
        # commit, a writer that verifies its reservation would still find the row, because this
        # database has no row locks that make the writer wait. Then the row would vanish.
        return False
    with unbound(), index.store.locked_values(row.entity_id, row.key) as state:
        if isinstance(state, EntityDamaged):
            return False
        if state is not None and index.is_current(state, row.values):
            return False
        same_rows(index, row.values, row.entity_id).filter(version=row.version).delete()
        return True


def _repeated(group: str, work: Callable[[], R]) -> R:
    """Return the result of ``work``. Call ``work`` again if its transaction was rolled back.

    A transaction is rolled back after a deadlock, for example on MariaDB if two writers reserve the
    same value, or because another process moves its key or shard. If the caller is in a transaction
    on ``group``, ``work`` is not called again, and the error is raised.

    :param work: the function to call. A second call must do no harm, even if a part of the first
        one was committed.
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
    """Whether the caller has an open transaction on the shard ``alias`` that is committed
    separately from writes on the shard ``other``.
    """
    connection: Any = connections[alias]
    # Read ``atomic_blocks`` before ``get_autocommit()``, because the connection joins an open
    # transaction of its shard group when the attribute is read.
    blocks = connection.atomic_blocks
    if not blocks and connection.get_autocommit():
        return False
    if alias == other or (blocks and all(block._from_testcase for block in blocks)):
        return False
    return not (connection.in_two_phase and connection.shard.group == _group_of(other))


def _group_of(alias: str) -> str:
    connection: Any = connections[alias]
    return str(connection.shard.group)
