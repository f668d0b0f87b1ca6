"""Find the largest existing ids of a sequence, in the tables of models that use the sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.apps import apps
from django.db import DEFAULT_DB_ALIAS, Error, connections, router
from django.db.models import F, Field, Max, Q
from django.db.models.lookups import Exact

from sharded_orm import runtime
from sharded_orm.exceptions import ScatterError, ShardDatabaseMissing
from sharded_orm.ids.tickets.exceptions import SequenceNotChecked
from sharded_orm.ids.tickets.session import SequenceSlot
from sharded_orm.models.fields import TicketField
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.models.tables.directory import missing_table_remedy

# The errors that say that a database, table or column does not exist. They are ignored, because
# what does not exist yet contains no ids. MySQL reports them by one of these numbers, SQLite by a
# message that begins with one of these texts, and PostgreSQL by one of these SQLSTATEs.
_MISSING_NUMBERS = {1049, 1054, 1146}
_MISSING_WORDS = ("no such table", "no such column")
_MISSING_STATES = {"3D000", "3F000", "42P01", "42703"}


@dataclass(frozen=True)
class Largest:
    """The largest id in the tables of the models that use a sequence, and where it was found."""

    id: int
    #: Where the id was found, such as "table 'photo' of group 'photos'".
    where: str


def declared_sequences() -> dict[str, list[TicketField]]:
    """Return a dict that maps the name of each sequence to the model fields that get ids from it.

    It has the fields of all installed models. The names are in alphabetical order.
    """
    fields_by_sequence: dict[str, list[TicketField]] = {}
    for model in apps.get_models():
        if model._meta.proxy:
            continue
        field: Field[Any, Any]
        for field in model._meta.local_concrete_fields:
            if isinstance(field, TicketField):
                fields_by_sequence.setdefault(field.sequence_name, []).append(field)
    return dict(sorted(fields_by_sequence.items()))


def largest(
    fields: Sequence[TicketField], *, above: int = 0, slot: SequenceSlot | None = None
) -> Largest | None:
    """Return the largest id in the tables of ``fields``; None if no id is above ``above``.

    Reads the table of a sharded model on all shards, and also in the global database, because its
    old table is there while the model is being moved to shards (as at Flickr, F4). A table that
    does not exist yet counts as empty.

    :param above: only ids above this number count.
    :param slot: the share of ids that one ticket server hands out (offset and step). Then only
        these ids count. By default, all ids count.
    :raises SequenceNotChecked: a database does not answer.
    """
    candidates = [
        candidate for field in fields for candidate in _in_tables(field, max(above, 0), slot)
    ]
    return max(candidates, key=lambda candidate: candidate.id, default=None)


def _in_tables(field: TicketField, above: int, slot: SequenceSlot | None) -> Iterator[Largest]:
    options = shard_options(field.model)
    table = field.model._meta.db_table
    if options is None:
        # Read from the database for writes, because a replica may lack the newest rows.
        alias = router.db_for_write(field.model)
    else:
        alias = DEFAULT_DB_ALIAS
        largest_id = _on_shards(field, above, slot)
        if largest_id is not None:
            yield Largest(largest_id, f"table {table!r} of group {options.group!r}")
    largest_id = _on_alias(alias, field, above, slot)
    if largest_id is not None:
        yield Largest(largest_id, f"table {table!r} of {alias!r}")


def _on_shards(field: TicketField, above: int, slot: SequenceSlot | None) -> int | None:
    # Do not use the model's own manager, because it might leave out rows, for example rows that are
    # marked as deleted.
    rows: ShardedQuerySet[Any] = ShardedQuerySet(field.model).scatter(partial=True)
    rows = rows.filter(Q(**{f"{field.attname}__gt": above}))
    if slot is not None:
        rows = rows.filter(Exact(F(field.attname) % slot.step, slot.position % slot.step))
    failures: Mapping[str, BaseException]
    try:
        largest_id = rows.aggregate(found=Max(field.attname))["found"]
        failures = rows.failed_shards
    except ScatterError as exc:
        # All shards have failed. The reason may be that no shard has the table yet, which is no
        # problem. So look at the error of each shard.
        largest_id, failures = None, exc.failures
    except Error as exc:
        if remedy := missing_table_remedy(exc, runtime.config().directory):
            raise SequenceNotChecked(
                f"The largest id of sequence {field.sequence_name!r} is not known. {remedy}"
            ) from exc
        raise _not_checked(field, rows._options.group, exc) from exc
    for alias, cause in failures.items():
        if not _is_missing(cause):
            raise _not_checked(field, alias, cause) from cause
    return None if largest_id is None else int(largest_id)


def _on_alias(alias: str, field: TicketField, above: int, slot: SequenceSlot | None) -> int | None:
    connection: Any = connections[alias]
    if connection.settings_dict["ENGINE"] == "django.db.backends.dummy":
        return None  # The project has no default database, so there are no ids in it.
    quote = connection.ops.quote_name
    try:
        with connection.cursor() as cursor:
            column = _column(connection, cursor, field)
            if column is None:
                return None
            sql = f"SELECT MAX({quote(column)}) FROM {quote(field.model._meta.db_table)}"
            sql, params = f"{sql} WHERE {quote(column)} > %s", [above]
            if slot is not None:
                sql += f" AND {quote(column)} %% %s = %s"
                params += [slot.step, slot.position % slot.step]
            cursor.execute(sql, params)
            (largest_id,) = cursor.fetchone()
    except Error as exc:
        if _is_missing(exc):
            return None
        raise _not_checked(field, alias, exc) from exc
    # The table may be older than the model's TicketField, and may have texts as primary keys. Then
    # the result is a text. Ignore it, because the ids of a sequence are integers.
    return largest_id if isinstance(largest_id, int) else None


def _column(connection: Any, cursor: Any, field: TicketField) -> str | None:
    """Return the name of the column with the ids; None if the table or the column does not exist.

    The table may be older than the model's TicketField, and its primary key column may have a
    different name. Then, if the TicketField is the primary key, return the name of that column.
    """
    introspection, table = connection.introspection, field.model._meta.db_table
    if table not in introspection.table_names(cursor):
        return None
    if field.column in {
        column.name for column in introspection.get_table_description(cursor, table)
    }:
        return str(field.column)
    if not field.primary_key:
        return None
    return introspection.get_primary_key_column(cursor, table)  # type: ignore[no-any-return]  # ``introspection`` has the type Any


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
