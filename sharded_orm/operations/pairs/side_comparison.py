"""Compare the rows of both sides of a pair, while the active side takes writes.

Both sides are read as they are at one and the same moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from sharded_orm import database_settings
from sharded_orm.operations.exceptions import PairRefused
from sharded_orm.operations.migrate.migration_records import TABLE

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.pair_side import MySQLPairSide

#: Maps a schema to its tables, and a table to the descriptions of its columns in their order.
Columns = Mapping[str, Mapping[str, Sequence[tuple[Any, ...]]]]
# The column with the time at which a migration was recorded. It differs, because each side has
# recorded the migration by itself.
_MOMENT = "applied"
# The number of differences that a message names.
_NAMED = 5


def compare(
    active: MySQLPairSide,
    passive: MySQLPairSide,
    schemas: Sequence[str],
    *,
    upgraded: bool,
    timeout: float,
    check: Callable[[], None],
) -> None:
    """Check that both sides have the same rows in ``schemas``.

    The passive side executes the changes up to the moment at which the active side is read. Then
    its replication stops, and it starts again before this function returns. Reads all tables on
    both servers.

    :param upgraded: whether both sides have the new schema. If False, only the passive side has it:
        it may have more tables, and more columns at the end of a table.
    :param timeout: seconds in which the passive side must execute the changes that it does not have
        yet.
    :param check: called before each table. It raises an error if this process must not continue.
    :raises PairRefused: rows or tables differ, or the passive side does not catch up in time.
    """
    here, there = active.columns(schemas), passive.columns(schemas)
    differences = [*_column_differences(here, there, upgraded=upgraded)]
    if not differences:
        differences += _row_differences(
            active, passive, here, upgraded=upgraded, timeout=timeout, check=check
        )
    if differences:
        more = f" and {len(differences) - _NAMED} more" if len(differences) > _NAMED else ""
        raise PairRefused(
            [
                f"{active.name!r} and {passive.name!r} have different {', '.join(differences[:_NAMED])}"
                f"{more}: {active.name!r} is the active side, so make {passive.name!r} anew from it"
            ]
        )


def _column_differences(here: Columns, there: Columns, *, upgraded: bool) -> Iterator[str]:
    for schema in sorted({*here, *there}):
        for table in sorted({*here.get(schema, ()), *there.get(schema, ())}):
            mine, theirs = here.get(schema, {}).get(table), there.get(schema, {}).get(table)
            is_new = mine is None and not upgraded
            if (
                not is_new
                and _names(mine) != _names(theirs)[: None if upgraded else len(mine or ())]
            ):
                yield f"columns of {schema}.{table}"


def _names(columns: Sequence[tuple[Any, ...]] | None) -> list[str]:
    return [str(column[0]) for column in columns or ()]


def _row_differences(
    active: MySQLPairSide,
    passive: MySQLPairSide,
    columns: Columns,
    *,
    upgraded: bool,
    timeout: float,
    check: Callable[[], None],
) -> Iterator[str]:
    link = passive.link_from(active)
    if link is None:
        raise PairRefused([f"{passive.name!r} does not replicate from {active.name!r} any more"])
    settings = [database_settings.operator_settings(side.name) or {} for side in (active, passive)]
    passive.stop(link.name)
    try:
        with (
            active.rows(settings[0]) as here,
            passive.rows(settings[1]) as there,
            ThreadPoolExecutor(1, thread_name_prefix="sharded_orm comparison") as thread,
            here.snapshot() as position,
        ):
            if not passive.run_until(link, active.own_part(position), timeout):
                raise PairRefused(
                    [
                        f"{passive.name!r} has not executed everything of {active.name!r} within"
                        f" {timeout:g} s: {'; '.join(passive.follow_problems(active)) or 'wait'}"
                    ]
                )
            for schema, tables in columns.items():
                for table, described in tables.items():
                    check()
                    names = [
                        name for name in _names(described) if (table, name) != (TABLE, _MOMENT)
                    ]
                    if table == TABLE and not upgraded:
                        continue
                    theirs = thread.submit(there.digest, schema, table, names)
                    if here.digest(schema, table, names) != theirs.result():
                        _require_same_moment(active, passive, position)
                        yield f"rows of {schema}.{table}"
    finally:
        passive.resume(link)
    passive.await_receiving(link)


def _require_same_moment(active: MySQLPairSide, passive: MySQLPairSide, position: str) -> None:
    """Check that the passive side has executed no changes after ``position``.

    Call this when rows differ. If the passive side has executed such changes, for example because
    somebody has started its replication, the difference proves nothing.

    :param position: the position in the log of the active side at which its rows were read.
    :raises PairRefused: the passive side has executed changes after ``position``.
    """
    if active.own_part(passive.status().current) != active.own_part(position):
        raise PairRefused(
            [
                f"the replication from {active.name!r} to {passive.name!r} was started during the comparison,"
                " so rows of different moments were compared: run the command again"
            ]
        )
