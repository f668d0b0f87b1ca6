"""Compare the rows of both sides of a pair at one moment, while the active side takes writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from sharded_orm import database_settings
from sharded_orm.operations.exceptions import PairRefused
from sharded_orm.operations.migrate.migration_records import TABLE

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.pair_side import MySQLPairSide

#: The columns of each table in their order, by schema and table.
Columns = Mapping[str, Mapping[str, Sequence[tuple[Any, ...]]]]
# Each side has recorded its migrations at a moment of its own.
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

    Replication to the passive side stops when the rows of the active side are read, and goes on
    before this returns. Reads all tables on both servers.

    :param upgraded: whether both sides have the new schema. If not, only the passive side has it:
        its tables may have more columns at their ends, and there may be more tables.
    :param timeout: seconds in which the passive side must execute what it lacks.
    :param check: called before each table. Raises an error if this process must not go on.
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
    """Check that the rows of both sides were those of ``position``.

    :raises PairRefused: the passive side has executed more.
    """
    if active.own_part(passive.status().current) != active.own_part(position):
        raise PairRefused(
            [
                f"the replication from {active.name!r} to {passive.name!r} was started during the comparison,"
                " so rows of different moments were compared: run the command again"
            ]
        )
