"""Versions of the rows of reference tables, and the lock under which copies are written.

A transaction that writes reference tables takes the lock and raises the version, just before its
commit. So versions grow in the order of commits. A process that holds the lock reads exactly the
rows of the current version.

Copies are written only under the lock. So a copy is never older than the version that its shard has
stored, and no row is deleted while its copy is being written.
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

#: One row of :class:`TableVersion` has this name: the version of all reference tables together.
#: Only the global database has this row.
GLOBAL = ""
#: The number of rows that one statement reads or writes.
BATCH = 500


def refuse_fixtures(sender: Any, raw: bool = False, **kwargs: Any) -> None:
    """Refuse to load rows of this app from a fixture. A receiver of ``pre_save``.

    The rows belong to the site that made the fixture. On this site, they could mark outdated copies
    as up to date.

    :raises InvalidReferenceModel: the fixture has such rows.
    """
    if raw and sender in (TableVersion, ChangedRow):
        raise InvalidReferenceModel(
            f"The fixture has rows of {sender._meta.label}, which say how far the copies of another site go."
            " Make it with 'dumpdata --exclude sharded_orm_references'."
        )


def begin_history(using: str, **kwargs: Any) -> None:
    """Insert the row with the version of the reference tables. A receiver of ``post_migrate``.

    So the row exists before the first writer needs it.
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


#: The names of global databases that have the tables of this app. A process may see several names,
#: because a test run switches to a test database.
_with_tables: set[str] = set()


def has_tables() -> bool:
    """Return whether this app is migrated, so that changes of reference tables can be recorded.

    Other apps may be migrated earlier, and write reference tables meanwhile. These changes need no
    record, because the first delivery of copies compares all rows. Costs a query per call until the
    tables exist.
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
    """The version of all reference tables: ``number`` grows with each transaction that writes them.

    ``history`` is a random number. A flush replaces it, and starts the numbers anew.
    """

    history: int
    number: int


def global_version() -> Version:
    """Return the version of the reference tables in the global database."""
    row = versions_on(DEFAULT_DB_ALIAS).filter(name=GLOBAL).first()
    return Version(0, 0) if row is None else Version(row.history, row.version)


def is_before(state: TableVersion, now: Version) -> bool:
    """Whether ``state`` is the version ``now`` or an earlier one.

    False if their histories differ: a flush lies between them, so they cannot be compared.
    """
    return state.history == now.history and state.version <= now.number


def lock() -> Version:
    """Lock the reference tables until the end of the transaction on the global database.

    :returns: the current version.
    """
    row = versions_on(DEFAULT_DB_ALIAS).filter(name=GLOBAL)
    if not row.update(version=F("version")):
        # The row is missing, because somebody has deleted it by hand. Insert it again. If two
        # processes do this at the same time, the second gets an IntegrityError.
        insert_rows(TableVersion, DEFAULT_DB_ALIAS, [_first_version()])
    return global_version()


def record(rows: Mapping[Any, Iterable[Any]]) -> None:
    """Raise the version of the reference tables, and record which rows were changed.

    Called just before the commit of the transaction that has changed the rows.

    :param rows: maps models to the primary keys of their changed rows.
    """
    lock()
    # Raise the version first, and then read it. At the isolation level REPEATABLE READ, a read
    # before the UPDATE might return an older version.
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
    """Return the primary keys of rows of ``model`` that were written or deleted after ``version``."""
    texts = changes().filter(name=model._meta.label, version__gt=version)
    return [value_of(model._meta.pk, text) for text in texts.values_list("row", flat=True)]


def removed_ahead(model: Any, row: TableVersion) -> list[Any]:
    """Return the primary keys of copies that were deleted on a shard before their rows in the
    global database.

    :param row: the shard's row of :class:`TableVersion` for the model.
    """
    return [value_of(model._meta.pk, text) for text in json.loads(row.removed)]


def note_removed(alias: str, model: Any, row: TableVersion, pks: Sequence[Any]) -> str:
    """Record on a shard that copies were deleted there, while the rows in the global database still
    exist.

    :param row: the shard's row of :class:`TableVersion` for the model.
    :param pks: the primary keys of the copies.
    :returns: the new value of the column ``removed``.
    """
    texts = {*json.loads(row.removed), *(text_of(model._meta.pk, pk) for pk in pks)}
    noted = json.dumps(sorted(texts))
    versions_on(alias).filter(pk=row.pk).update(removed=noted)
    return noted


def set_version(alias: str, columns: Mapping[str, str], version: Version) -> None:
    """Record that the copies of some models on a shard have all changes up to ``version``.

    :param columns: maps the labels of the models to hashes of the names of their copied columns.
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
    """Insert rows as they are, without ``pre_save()`` of their fields and without an atomic block.

    :param fields: the fields to write; None for all.
    """
    fields = fields or model._meta.local_concrete_fields
    connection = connections[alias]
    size = max(1, min(BATCH, connection.ops.bulk_batch_size(fields, list(rows))))
    for start in range(0, len(rows), size):
        queryset: Any = QuerySet(model, using=alias)
        queryset._insert(rows[start : start + size], fields, using=alias, raw=True)
