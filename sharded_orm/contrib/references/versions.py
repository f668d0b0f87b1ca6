"""Versions of the rows of reference tables, and the lock under which copies are written.

Each transaction that writes reference tables takes the lock before its commit, and raises the
version. So a higher version is always committed later, and whoever holds the lock reads exactly the
rows of the current version. Copies are written only under the lock. So a copy is never older than
the version that its shard has stored, and no row is deleted while its copy is being written.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections
from django.db.models import F, QuerySet

from sharded_orm.contrib.mirrors.declaration import text_of, value_of
from sharded_orm.contrib.references.exceptions import InvalidReferenceModel
from sharded_orm.contrib.references.models import ChangedRow, TableVersion
from sharded_orm.database_clock import DatabaseClock

#: The name of the row of :class:`TableVersion` with the version of all reference tables together.
#: Only the global database has this row.
GLOBAL = ""
#: The number of rows that one statement reads or writes.
BATCH = 500


def refuse_fixtures(sender: Any, raw: bool = False, **kwargs: Any) -> None:
    """Refuse to load rows of this app from a fixture. A receiver of ``pre_save``.

    The versions in a fixture belong to the site that made it. On this site, they could mark
    outdated copies as up to date.

    :raises InvalidReferenceModel: the fixture has such rows.
    """
    if raw and sender in (TableVersion, ChangedRow):
        raise InvalidReferenceModel(
            f"The fixture has rows of {sender._meta.label}, which say how far the copies of another site go."
            " Make it with 'dumpdata --exclude sharded_orm_references'."
        )


def begin_history(using: str, **kwargs: Any) -> None:
    """Insert the row with the version of all reference tables, so that no writer has to insert it.

    A receiver of ``post_migrate``.
    """
    if using != DEFAULT_DB_ALIAS:
        return
    # Forget which databases have the tables of this app, because a migration backwards may have
    # dropped them.
    _with_tables.clear()
    if has_tables() and not versions_on(using).filter(name=GLOBAL).exists():
        insert_rows(TableVersion, using, [_first_version()])


def _first_version() -> TableVersion:
    return TableVersion(name=GLOBAL, version=0, history=secrets.randbits(63))


#: The names of global databases that are known to have this app's tables. There may be several
#: names in one process, because a test run switches to a test database.
_with_tables: set[str] = set()


def has_tables() -> bool:
    """Whether the global database has the tables that record changes of reference tables.

    Without them, changes need not be recorded, because the first delivery of copies compares all
    rows. So other apps may be migrated before this app, and may write reference tables. Costs a
    query per call until the tables exist.
    """
    connection = connections[DEFAULT_DB_ALIAS]
    name = str(connection.settings_dict["NAME"])
    if name not in _with_tables:
        with connection.cursor() as cursor:
            tables = {info.name for info in connection.introspection.get_table_list(cursor)}
        if not {TableVersion._meta.db_table, ChangedRow._meta.db_table} <= tables:
            return False
        _with_tables.add(name)
    return True


def versions_on(alias: str) -> QuerySet[TableVersion]:
    return QuerySet(TableVersion, using=alias)


def changes() -> QuerySet[ChangedRow]:
    return QuerySet(ChangedRow, using=DEFAULT_DB_ALIAS)


@dataclass(frozen=True)
class Version:
    """A version (``number``) of the rows of all reference tables in the global database.

    ``history`` is a random number for the sequence of versions. A flush begins a new sequence.
    """

    history: int
    number: int


def global_version() -> Version:
    """Return the version of the reference tables in the global database."""
    row = versions_on(DEFAULT_DB_ALIAS).filter(name=GLOBAL).first()
    return Version(0, 0) if row is None else Version(row.history, row.version)


def is_before(state: TableVersion, now: Version) -> bool:
    """Whether ``state`` is not later than ``now``, in the same sequence of versions.

    A flush begins a new sequence, so versions before and after it cannot be compared.
    """
    return state.history == now.history and state.version <= now.number


def lock() -> Version:
    """Lock the reference tables until the end of the transaction on the global database.

    :returns: the current version.
    """
    row = versions_on(DEFAULT_DB_ALIAS).filter(name=GLOBAL)
    if not row.update(version=F("version")):
        # Insert the version row again: it was deleted by hand. If two processes do this at the same
        # time, the second gets an IntegrityError.
        insert_rows(TableVersion, DEFAULT_DB_ALIAS, [_first_version()])
    return global_version()


def record(rows: Mapping[Any, Iterable[Any]]) -> None:
    """Raise the version of the reference tables, and record which rows were changed.

    Called just before the commit of the transaction that has changed the rows.

    :param rows: primary keys of the changed rows, by model.
    """
    lock()
    # Raise the version before it is read: at the isolation level REPEATABLE READ, a read before the
    # UPDATE might return an older version.
    versions_on(DEFAULT_DB_ALIAS).filter(name=GLOBAL).update(version=F("version") + 1)
    version = global_version().number
    for model, pks in rows.items():
        texts = sorted({text_of(model._meta.pk, pk) for pk in pks})
        for start in range(0, len(texts), BATCH):
            page = texts[start : start + BATCH]
            doomed: Any = changes().filter(name=model._meta.label, row__in=page)
            doomed._raw_delete(DEFAULT_DB_ALIAS)
            insert_rows(
                ChangedRow,
                DEFAULT_DB_ALIAS,
                [
                    ChangedRow(
                        name=model._meta.label,
                        row=text,
                        version=version,
                        changed_at=DatabaseClock(),
                    )
                    for text in page
                ],
            )


def changed_since(model: Any, version: int) -> list[Any]:
    """Return the primary keys of rows that were written or removed after ``version``."""
    texts = changes().filter(name=model._meta.label, version__gt=version)
    return [value_of(model._meta.pk, text) for text in texts.values_list("row", flat=True)]


def removed_ahead(model: Any, row: TableVersion) -> list[Any]:
    """Return the primary keys of copies that a shard has removed before their global rows were deleted.

    :param row: the shard's row of :class:`TableVersion` for the model.
    """
    return [value_of(model._meta.pk, text) for text in json.loads(row.removed)]


def note_removed(alias: str, model: Any, row: TableVersion, pks: Sequence[Any]) -> str:
    """Record on a shard that copies were deleted there, before the global rows are deleted.

    :param row: the shard's row of :class:`TableVersion` for the model.
    :param pks: the primary keys of the copies.
    :returns: the new value of the column ``removed``.
    """
    texts = {*json.loads(row.removed), *(text_of(model._meta.pk, pk) for pk in pks)}
    noted = json.dumps(sorted(texts))
    versions_on(alias).filter(pk=row.pk).update(removed=noted)
    return noted


def set_version(alias: str, columns: Mapping[str, str], version: Version) -> None:
    """Record that the shard's copies of these models have the changes up to ``version``.

    :param columns: hashes of the copied columns, by the label of the model.
    """
    there = versions_on(alias).filter(name__in=columns)
    known = dict(there.values_list("name", "columns"))
    for name in known:
        if known[name] != columns[name]:
            there.filter(pk=name).update(columns=columns[name])
    there.update(version=version.number, history=version.history, removed="[]")
    new = [
        TableVersion(
            name=name, version=version.number, history=version.history, columns=columns[name]
        )
        for name in columns
        if name not in known
    ]
    insert_rows(TableVersion, alias, new)


def insert_rows(model: Any, alias: str, rows: Sequence[Any], fields: Any = None) -> None:
    """Insert rows as they are, without opening an atomic block.

    :param fields: the fields to be written; None for all.
    """
    fields = fields or model._meta.local_concrete_fields
    connection = connections[alias]
    size = max(1, min(BATCH, connection.ops.bulk_batch_size(fields, list(rows))))
    for start in range(0, len(rows), size):
        queryset: Any = QuerySet(model, using=alias)
        queryset._insert(rows[start : start + size], fields, using=alias, raw=True)
