"""Undo migrations on one side of a pair: give it back the schema that the other side has.

No migration runs backwards: an aborted upgrade may have stopped in the middle of a migration, and
some migrations cannot be undone. Instead, each table gets the definition that it has on the other
side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from django.db import connections
from django.db.migrations.recorder import MigrationRecorder

from sharded_orm import database_settings
from sharded_orm.backends.snapshot import OWN_PREFIX, SchemaSnapshot
from sharded_orm.operations.exceptions import PairRefused
from sharded_orm.operations.migrate.migration_records import TABLE
from sharded_orm.operations.pairs.side_switch import close_side
from sharded_orm.operations.pairs.side_topology import only_on
from sharded_orm.operations.pairs.sides import open_fence
from sharded_orm.topology.model import Shard

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.pair_side import MySQLPairSide
    from sharded_orm.backends.mysql.side_rows import MySQLSideRows

#: The name of a constraint that refuses all rows but the copied ones. A table that is created anew
#: has this constraint until all its rows are copied. It is needed because the new table has no
#: triggers of the fence at first, so everybody could write to it. If this process is killed, the
#: constraint also shows the next process that the table is not complete.
FILLING: Final = f"{OWN_PREFIX}filling"


@dataclass(frozen=True)
class _OldState:
    """What one shard has on the side with the old schema: its schema, and the ids of its rows in
    ``django_migrations``.
    """

    schema: SchemaSnapshot
    records: Sequence[int]


def return_schema(
    shards: Iterable[Shard],
    side: MySQLPairSide,
    model: MySQLPairSide,
    *,
    copies_rows: bool,
    check: Callable[[], None],
    confirm: Callable[[], object],
) -> None:
    """Give each shard on ``side`` the schema that it has on ``model``. Can be repeated.

    The changes are not replicated. ``side`` must be the passive side, and must execute no
    replicated rows meanwhile.

    :param model: the other side, which has the old schema.
    :param copies_rows: what to do with a table whose old values are lost on ``side``, for example
        because a column was dropped. True copies all its rows from ``model``. During the copy, no
        row may be written on either side. False raises :exc:`PairRefused` for such a table.
    :param check: called before each shard. It raises an error if this process must not continue.
    :param confirm: called before each change of a table. It raises the same error as ``check``.
        Unlike ``check``, it is reliable even if this process was paused for long and another
        process has given the table its new schema meanwhile.
    :raises PairRefused: a table cannot get its old definition, or still differs afterwards.

    Costs an ``ALTER TABLE`` for each changed table, and the time to copy rows.
    """
    pair = (side.name, model.name)
    for shard in shards:
        check()
        with shard_connection(shard, model, pair) as connection:
            wanted = _read(shard, connection)
        with shard_connection(shard, side, pair) as connection:
            lost = _change(shard, connection, wanted.schema, side, confirm)
        if lost and not copies_rows:
            raise PairRefused(
                [
                    f"{shard.alias} on {side.name!r}: the old values of {', '.join(lost)} are gone: make"
                    f" {side.name!r} anew from {model.name!r}"
                ]
            )
        if lost:
            _replace_tables(shard, side, model, wanted.schema, lost, check, confirm)
        with shard_connection(shard, side, pair) as connection:
            _forget_migrations(shard, connection, wanted, confirm)
            if differences := connection.schema_snapshot().differences(wanted.schema):
                raise PairRefused(
                    f"{shard.alias} on {side.name!r}: {difference}" for difference in differences
                )


@contextmanager
def shard_connection(shard: Shard, side: MySQLPairSide, pair: Iterable[str]) -> Iterator[Any]:
    """A context manager that yields a connection to ``shard`` on ``side``.

    It is a connection to ``side`` even if the other side of the pair is active for the shard. What
    it writes is not replicated; see :func:`only_on`.
    """
    with only_on(side, pair):
        connection: Any = connections[shard.alias]
        try:
            yield connection
        finally:
            connection.close_and_forget()


def _read(shard: Shard, connection: Any) -> _OldState:
    schema = connection.schema_snapshot()
    rows = MigrationRecorder.Migration.objects.using(shard.alias)
    records = [*rows.values_list("pk", flat=True)] if TABLE in schema.definitions else []
    return _OldState(schema, records)


def _change(
    shard: Shard,
    connection: Any,
    wanted: SchemaSnapshot,
    side: MySQLPairSide,
    confirm: Callable[[], object],
) -> list[str]:
    """Give tables their old definition by ALTER TABLE, and drop tables that the old schema lacks.

    Return the names of tables for which ALTER TABLE is not enough. For example, a migration has
    dropped a column, so its values must be copied from the other side.
    """
    present, lost = connection.schema_snapshot(), []
    quote = connection.ops.quote_name
    for table in sorted({*present.definitions, *wanted.definitions}):
        mine, theirs = present.definitions.get(table), wanted.definitions.get(table)
        if mine == theirs:
            continue
        if theirs is None:
            _execute(connection, f"DROP TABLE {quote(table)}", confirm)
        elif mine is None or FILLING in mine:
            lost.append(table)
        elif change := side.alteration(quote(table), mine, theirs):
            _execute(connection, change, confirm)
        else:
            lost.append(table)
    return lost


def _execute(connection: Any, statement: str, confirm: Callable[[], object]) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET foreign_key_checks = 0")
        try:
            confirm()
            cursor.execute(statement)
        finally:
            cursor.execute("SET foreign_key_checks = 1")


def _replace_tables(
    shard: Shard,
    side: MySQLPairSide,
    model: MySQLPairSide,
    wanted: SchemaSnapshot,
    tables: Sequence[str],
    check: Callable[[], None],
    confirm: Callable[[], object],
) -> None:
    """Create ``tables`` anew on ``side``, and copy their rows from the other side, ``model``."""
    own, source = (database_settings.operator_settings(each.name) or {} for each in (side, model))
    with side.rows(side.quiet_settings(own)) as mine, model.rows(source) as theirs:
        for table in tables:
            check()
            _require_primary_key(shard, theirs, table)
            confirm()
            mine.create_closed(shard.schema, table, wanted.definitions[table], FILLING)
        with open_fence(replace(shard, node=side.name), check) as fence:
            close_side(fence)
        for table in tables:
            confirm()
            mine.fill(shard.schema, table, theirs, check)
            confirm()
            mine.accept_rows(table, FILLING, wanted.counters.get(table))


def _require_primary_key(shard: Shard, rows: MySQLSideRows, table: str) -> None:
    try:
        rows.table(shard.schema, table)
    except LookupError as exc:
        raise PairRefused(
            [f"{shard.alias}: {table} has no primary key, so its rows cannot be copied"]
        ) from exc


def _forget_migrations(
    shard: Shard, connection: Any, wanted: _OldState, confirm: Callable[[], object]
) -> None:
    """Delete the records of migrations that the other side does not have.

    Then set the counter of the ids of ``django_migrations`` to the value of the other side, so that
    later rows get the same ids on both sides.

    :param wanted: the state of the shard on the other side.
    """
    rows = MigrationRecorder.Migration.objects.using(shard.alias)
    confirm()
    rows.exclude(pk__in=wanted.records).delete()
    if counter := wanted.schema.counters.get(TABLE):
        table = connection.ops.quote_name(TABLE)
        _execute(connection, f"ALTER TABLE {table} AUTO_INCREMENT = {counter:d}", confirm)
