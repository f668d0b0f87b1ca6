"""The largest ids that exist, in the tables of the fields that draw from a sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.apps import apps
from django.db import DEFAULT_DB_ALIAS, Error, connections, router
from django.db.models import F, Field, Max, Q
from django.db.models.lookups import Exact

from sharded_orm.exceptions import ScatterError, SequenceNotChecked, ShardDatabaseMissing
from sharded_orm.ids.tickets.session import SequenceSlot
from sharded_orm.models.fields import TicketField
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from sharded_orm.models.sharding.options import shard_options

# What has not been migrated yet holds no ids: database, table or column. MySQL's error
# numbers, SQLite's words, PostgreSQL's SQLSTATEs.
_MISSING_NUMBERS = {1049, 1054, 1146}
_MISSING_WORDS = ("no such table", "no such column")
_MISSING_STATES = {"3D000", "3F000", "42P01", "42703"}


@dataclass(frozen=True)
class Largest:
    """An id, and the table in which it is."""

    id: int
    where: str


def declared() -> dict[str, list[TicketField]]:
    """The sequences that the installed models draw from, with the fields that do, by name."""
    found: dict[str, list[TicketField]] = {}
    for model in apps.get_models():
        if model._meta.proxy:
            continue
        field: Field[Any, Any]
        for field in model._meta.local_concrete_fields:
            if isinstance(field, TicketField):
                found.setdefault(field.sequence_name, []).append(field)
    return dict(sorted(found.items()))


def largest(
    fields: Sequence[TicketField], *, above: int = 0, place: SequenceSlot | None = None
) -> Largest | None:
    """The largest id above ``above`` in the tables of ``fields``; None when there is none.

    Sharded tables are asked on all shards, and so is the table of that name in the global
    database: a model that is being moved still has it (F4). What has not been migrated yet
    counts as empty.

    :param above: nothing at or below it is read.
    :param place: only ids that this server gives.
    :raises SequenceNotChecked: a database does not answer.
    """
    found = [one for field in fields for one in _in_tables(field, max(above, 0), place)]
    return max(found, key=lambda one: one.id, default=None)


def _in_tables(field: TicketField, above: int, place: SequenceSlot | None) -> Iterator[Largest]:
    options = shard_options(field.model)
    table = field.model._meta.db_table
    if options is None:
        alias = router.db_for_write(field.model)  # A replica may not have the last rows.
    else:
        alias = DEFAULT_DB_ALIAS
        number = _on_shards(field, above, place)
        if number is not None:
            yield Largest(number, f"table {table!r} of group {options.group!r}")
    number = _on_alias(alias, field, above, place)
    if number is not None:
        yield Largest(number, f"table {table!r} of {alias!r}")


def _on_shards(field: TicketField, above: int, place: SequenceSlot | None) -> int | None:
    # Not by the model's manager, which may leave rows out.
    rows = ShardedQuerySet(field.model).scatter(partial=True)
    rows = rows.filter(Q(**{f"{field.attname}__gt": above}))
    if place is not None:
        rows = rows.filter(Exact(F(field.attname) % place.step, place.position % place.step))
    failed: Mapping[str, BaseException]
    try:
        found = rows.aggregate(found=Max(field.attname))["found"]
        failed = rows.failed_shards
    except ScatterError as exc:
        found, failed = None, exc.failures  # Perhaps no shard has the table yet.
    except Error as exc:
        raise _not_checked(field, rows._options.group, exc) from exc
    for alias, cause in failed.items():
        if not _is_missing(cause):
            raise _not_checked(field, alias, cause) from cause
    return None if found is None else int(found)


def _on_alias(alias: str, field: TicketField, above: int, place: SequenceSlot | None) -> int | None:
    connection: Any = connections[alias]
    if connection.settings_dict["ENGINE"] == "django.db.backends.dummy":
        return None  # DATABASES has no default.
    name = connection.ops.quote_name
    try:
        with connection.cursor() as cursor:
            column = _column(connection, cursor, field)
            if column is None:
                return None
            sql = f"SELECT MAX({name(column)}) FROM {name(field.model._meta.db_table)}"
            sql, params = f"{sql} WHERE {name(column)} > %s", [above]
            if place is not None:
                sql += f" AND {name(column)} %% %s = %s"
                params += [place.step, place.position % place.step]
            cursor.execute(sql, params)
            (found,) = cursor.fetchone()
    except Error as exc:
        if _is_missing(exc):
            return None
        raise _not_checked(field, alias, exc) from exc
    # The key of an older table may have been text.
    return found if isinstance(found, int) else None


def _column(connection: Any, cursor: Any, field: TicketField) -> str | None:
    """Where the ids are: an older table may call its key otherwise."""
    look, table = connection.introspection, field.model._meta.db_table
    if table not in look.table_names(cursor):
        return None
    if field.column in {column.name for column in look.get_table_description(cursor, table)}:
        return str(field.column)
    if not field.primary_key:
        return None
    return look.get_primary_key_column(cursor, table)  # type: ignore[no-any-return]  # look is Any


def _is_missing(exc: BaseException) -> bool:
    return (
        isinstance(exc, ShardDatabaseMissing)
        or exc.args[:1] in {(number,) for number in _MISSING_NUMBERS}
        or str(exc).startswith(_MISSING_WORDS)
        or getattr(exc.__cause__, "sqlstate", None) in _MISSING_STATES
    )


def _not_checked(field: TicketField, alias: str, cause: BaseException) -> SequenceNotChecked:
    return SequenceNotChecked(
        f"The largest id of sequence {field.sequence_name!r} is not known: {alias!r}, which may"
        f" have rows of {field.model._meta.label}, does not answer ({cause}). Run it again when it"
        " does, or say where to go on, above every id: '--start N --no-check' for create, '--to N"
        " --no-check' for advance."
    )
