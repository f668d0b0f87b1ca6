"""Drop defaults of columns in the database that a rolling upgrade has kept for old releases.

A rolling upgrade adds a column while processes of the old release still insert rows without it. The
default gives such rows a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from django.apps import apps
from django.db import connections, router
from django.db.models import Field, Model

from sharded_orm.operations.exceptions import PairRefused
from sharded_orm.operations.pairs.pair_servers import open_pair
from sharded_orm.operations.pairs.side_topology import only_on
from sharded_orm.operations.pairs.upgrade_state import KIND
from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.conflicts import EVERYTHING, refuse_conflicts
from sharded_orm.topology.model import Shard

# If a column has no default and may be NULL, the server shows one of these values as its default.
_NO_DEFAULT = (None, "NULL")


def drop_kept_defaults(first: str, second: str) -> list[str]:
    """Drop the default of each column of the pair's shards whose field has no ``db_default``.

    Call this only when every process runs a release whose models have these fields. An older
    release inserts rows without these columns, and such an insert fails without the defaults. The
    statements run on the active sides, with the operators' accounts, and are replicated. Can be
    called again.

    :returns: the columns, such as ``photos_00001: app_photo.stars``.
    :raises PairRefused: a rolling upgrade is not finished, or no connection to the pair can be
        opened.
    :raises OperationHeld: another process works on the shards.
    """
    with journal.hold_run(KIND, EVERYTHING, {"pair": [first, second]}) as run:
        if "done" in run.arguments:
            raise PairRefused(["a rolling upgrade is not finished: finish it by the same command"])
        refuse_conflicts(run)
        try:
            dropped = _drop(first, second, run)
        except BaseException as exc:
            run.finish("failed", journal.one_line(exc))
            raise
        run.finish()
    return dropped


def _drop(first: str, second: str, run: journal.JournalRun) -> list[str]:
    dropped = []
    with open_pair(first, second) as servers:
        for side in servers.both:
            own = [shard for shard in servers.shards if shard.node == side.name]
            columns = side.columns([shard.schema for shard in own])
            with only_on(side, (first, second), is_logged=True):
                for shard in own:
                    dropped += _drop_on(shard, columns.get(shard.schema, {}), run)
    return dropped


def _drop_on(
    shard: Shard, columns: Mapping[str, Sequence[tuple[Any, ...]]], run: journal.JournalRun
) -> list[str]:
    defaults = {
        (table, str(column[0]))
        for table, described in columns.items()
        for column in described
        if column[-1] not in _NO_DEFAULT
    }
    connection: Any = connections[shard.alias]
    dropped = []
    try:
        for model, field in _fields_with(shard, defaults):
            run.check()
            _drop_default(connection, model, field)
            dropped.append(f"{shard.alias}: {model._meta.db_table}.{field.column}")
    finally:
        connection.close_and_forget()
    return dropped


def _fields_with(
    shard: Shard, columns: set[tuple[str, str]]
) -> Iterator[tuple[type[Model], Field[Any, Any]]]:
    for model in apps.get_models(include_auto_created=True):
        if router.allow_migrate_model(shard.alias, model):
            for field in model._meta.local_concrete_fields:
                if (model._meta.db_table, field.column) in columns and not field.has_db_default():
                    yield model, field


def _drop_default(connection: Any, model: type[Model], field: Field[Any, Any]) -> None:
    # This is the statement by which Django drops the default of a new column.
    with connection.schema_editor() as editor:
        drop = editor.sql_alter_column_no_default
        if field.null:
            drop = editor.sql_alter_column_no_default_null
        names = {"column": editor.quote_name(field.column), "type": field.db_type(connection)}
        table = editor.quote_name(model._meta.db_table)
        editor.execute(editor.sql_alter_column % {"table": table, "changes": drop % names}, None)
