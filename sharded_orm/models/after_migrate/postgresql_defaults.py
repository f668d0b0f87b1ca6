"""Sets the column defaults with which PostgreSQL generates timestamped ids (Instagram, I3).

Such a default, and the function that it calls, differ between databases. A migration is the same
for all databases and cannot contain them, so they are set after each ``migrate``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from django.apps import AppConfig, apps
from django.db import connections, transaction
from django.db.models import Model

from sharded_orm.backends.features import features_of
from sharded_orm.ids.layout import TimestampedLayout
from sharded_orm.ids.timestamps_postgresql import (
    create_function,
    create_sequence,
    function_name,
    set_default,
)
from sharded_orm.models.fields.generated_id import shard_of
from sharded_orm.models.fields.timestamped import TimestampedIDField
from sharded_orm.topology.model import Shard


def after_migrate(sender: AppConfig, using: str, **kwargs: Any) -> None:
    """Receiver of ``post_migrate``: set the functions and defaults that generate timestamped ids.

    Does nothing on databases that are not PostgreSQL, or for an app without such ids. Otherwise
    sends one query, and for each id column one statement. The statement replaces the function that
    the column's default calls. The default is set only if it does not call this function already,
    because setting a default waits for all open transactions on the table.
    """
    connection = connections[using]
    if not features_of(connection).makes_timestamped_ids:
        return
    fields = _fields(sender)
    if not fields:
        return
    shard = shard_of(using)
    # If the alias is not a shard, it may be a template schema, from which test shards are cloned.
    # In a template schema, the shard number is 0.
    number = shard.number if shard is not None else 0
    with transaction.atomic(using=using), connection.cursor() as cursor:
        cursor.execute(
            "SELECT table_name, column_name, column_default, table_schema"
            " FROM information_schema.columns"
            " WHERE table_schema = current_schema() AND table_name = ANY(%s)",
            [[table for table, _ in fields]],
        )
        for table, column, default, schema in cursor.fetchall():
            field = fields.get((table, column))
            if field is None:
                continue
            cursor.execute(create_function(schema, number, field.layout))
            if function_name(field.layout) not in (default or ""):
                for statement in create_sequence(schema, table, column):
                    cursor.execute(statement)
                cursor.execute(set_default(schema, table, column, field.layout))


def functions_of(shard: Shard, present: Collection[str]) -> Iterator[str]:
    """Yield, for each function that generates ids on ``shard``, the SQL statement that replaces it.

    If the schema of ``shard`` was copied from another shard, its functions contain the other
    shard's number, so they must be replaced.

    :param present: the names of the functions that exist in the schema of ``shard``. No statement
        is yielded for other functions.
    """
    for name, layout in layouts().items():
        if name in present:
            yield create_function(shard.schema, shard.number, layout)


def layouts() -> dict[str, TimestampedLayout]:
    """Return the layouts of all timestamped ids of the project, keyed by the names of their functions."""
    return {function_name(field.layout): field.layout for field in _timestamped(apps.get_models())}


def tables() -> set[str]:
    """Return the tables of all models of the project that have timestamped ids."""
    return {field.model._meta.db_table for field in _timestamped(apps.get_models())}


def _fields(app: AppConfig) -> dict[tuple[str, str], TimestampedIDField]:
    """Return the timestamped id fields of an app, keyed by table and column."""
    return {
        (field.model._meta.db_table, str(field.column)): field
        for field in _timestamped(app.get_models())
    }


def _timestamped(models: Iterable[type[Model]]) -> Iterator[TimestampedIDField]:
    for model in models:
        if model._meta.managed and not model._meta.proxy:
            for field in model._meta.local_concrete_fields:
                if isinstance(field, TimestampedIDField):
                    yield field
