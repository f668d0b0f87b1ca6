"""Reads from one shard those columns of entities that are needed to compute index rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sharded_orm import unbound
from sharded_orm.contrib.entities.pending_rows import PendingRows

if TYPE_CHECKING:
    from sharded_orm.contrib.entities.clean_report import CleanReport
    from sharded_orm.contrib.entities.store import DataStore

#: The number of entities that a cleaner reads at once. It is below 1000, because MariaDB turns a list
#: of 1000 values into a subquery.
BATCH = 900


@dataclass(frozen=True)
class StoredEntity:
    """The part of an entity that a cleaner reads from a shard in order to compute its index rows.

    :param key: the shard key of the entity.
    :param stored: the declared properties of the entity; empty if it was deleted.
    :param pending: the index rows of the entity's earlier versions, which may still be stored.
    """

    pk: int
    id: UUID
    key: Any
    version: int
    stored: Mapping[str, Any]
    pending: PendingRows
    is_deleted: bool = False


def rows_of(store: DataStore, alias: str) -> Any:
    """Return a queryset of the store's entities on the shard ``alias``."""
    manager: Any = store.model._default_manager
    return manager.using(alias)


def columns_of(store: DataStore) -> tuple[str, ...]:
    """Return the names of the columns that :func:`stored_entities` needs."""
    key = () if store.shard_on is None else (store.shard_on,)
    return ("added_id", "id", "version", "body", "pending", *key)


def stored_entities(
    store: DataStore, rows: Sequence[tuple[Any, ...]], report: CleanReport
) -> list[StoredEntity]:
    """Convert rows to entities. If a row is damaged, add it to the report instead.

    :param rows: values of the columns in :func:`columns_of`, perhaps followed by values of further
        columns.
    """
    entities = []
    for pk, entity_id, version, body, pending, *more in rows:
        key = entity_id if store.shard_on is None else more[0]
        try:
            stored = store.declared(bytes(body)) if body else {}
        except ValueError as exc:
            report.add_damage(f"The body {_damaged(store, entity_id)}: {exc}.")
            continue
        try:
            former = PendingRows(pending)
        except ValueError as exc:
            report.add_damage(
                f"The column 'pending' {_damaged(store, entity_id)}: {exc}. Set it to NULL."
            )
            continue
        entities.append(StoredEntity(pk, entity_id, key, version, stored, former, not body))
    return entities


def _damaged(store: DataStore, entity_id: UUID) -> str:
    return f"of entity {entity_id} in store {store.name!r} is damaged"


def entity_batches(
    store: DataStore, rows: Any, report: CleanReport
) -> Iterator[list[StoredEntity]]:
    """Yield the entities of a query in batches, the oldest first.

    Entities that are added after the call are left out. Their writers write their index rows. And
    if they were not left out, a caller that reads more slowly than entities are added would never
    finish.
    """
    with unbound():
        newest = rows.order_by("-added_id").values_list("added_id", flat=True).first()
    last = None
    while newest is not None:
        with unbound():
            behind = rows.filter(added_id__lte=newest)
            if last is not None:
                behind = behind.filter(added_id__gt=last)
            found = list(behind.order_by("added_id").values_list(*columns_of(store))[:BATCH])
        if not found:
            return
        last = found[-1][0]
        yield stored_entities(store, found, report)
