"""Read the states of the fences of many schemas on one MariaDB server, with few queries. (The fence
refuses writes on the passive side of a pair.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from django.db import OperationalError

from sharded_orm.backends.mysql.side_fence import EVENTS, UNKNOWN_FUNCTION
from sharded_orm.backends.side_fence import FUNCTION, TRIGGER_PREFIX, FenceState
from sharded_orm.backends.snapshot import OWN_PREFIX

# How many times to try the queries. A try fails if a fence is removed after the first query has
# found its function, and before the second query calls the function.
_ATTEMPTS: Final = 5
# How many functions one query calls at most. MariaDB accepts up to 4096 columns in a query.
_BATCH: Final = 1000


def fence_states(
    rows: Callable[..., Sequence[dict[str, Any]]],
    quote: Callable[[str], str],
    schemas: Sequence[str],
) -> dict[str, FenceState]:
    """Return a dict that maps each of ``schemas`` to the state of its fence. Changes nothing.

    Sends two queries for up to 1,000 schemas. If a fence is removed meanwhile, both are sent again.

    :param rows: function that sends a query with parameters, and returns its rows as dicts.
    :param quote: function that quotes a name.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        fenced, tables, triggers = _objects(rows, schemas)
        try:
            closed = _closed(rows, quote, [schema for schema in schemas if schema in fenced])
        except OperationalError as exc:
            if exc.args[0] != UNKNOWN_FUNCTION or attempt == _ATTEMPTS:
                raise
        else:
            break
    open_tables: dict[str, list[str]] = {}
    for schema, table in sorted(tables):
        if triggers.get((schema, table), 0) < len(EVENTS) and not table.startswith(OWN_PREFIX):
            open_tables.setdefault(schema, []).append(table)
    return {
        schema: FenceState(schema in closed, tuple(open_tables.get(schema, ())))
        for schema in schemas
    }


def _objects(
    rows: Callable[..., Sequence[dict[str, Any]]], schemas: Sequence[str]
) -> tuple[set[str], set[tuple[str, str]], dict[tuple[str, str], int]]:
    """Return three results about ``schemas``:

    - the set of schemas that have the function of a fence,
    - the tables, as pairs (schema, table),
    - a dict that maps (schema, table) to how many triggers of the fence the table has, for tables
      with triggers.
    """
    listed = ", ".join(["%s"] * len(schemas))
    fenced: set[str] = set()
    tables: set[tuple[str, str]] = set()
    triggers: dict[tuple[str, str], int] = {}
    for row in rows(
        "SELECT 'function' kind, ROUTINE_SCHEMA place, '' name, 1 number"
        " FROM information_schema.ROUTINES WHERE ROUTINE_NAME = %s"
        " UNION ALL SELECT 'table', TABLE_SCHEMA, TABLE_NAME, 1 FROM information_schema.TABLES"
        f" WHERE TABLE_SCHEMA IN ({listed}) AND TABLE_TYPE = 'BASE TABLE'"
        " UNION ALL SELECT 'triggers', EVENT_OBJECT_SCHEMA, EVENT_OBJECT_TABLE, COUNT(*)"
        f" FROM information_schema.TRIGGERS WHERE EVENT_OBJECT_SCHEMA IN ({listed})"
        " AND LEFT(TRIGGER_NAME, %s) = %s GROUP BY 2, 3",
        FUNCTION,
        *schemas,
        *schemas,
        len(TRIGGER_PREFIX),
        TRIGGER_PREFIX,
    ):
        place = (str(row["place"]), str(row["name"]))
        if row["kind"] == "function":
            fenced.add(place[0])
        elif row["kind"] == "table":
            tables.add(place)
        else:
            triggers[place] = int(row["number"])
    return fenced, tables, triggers


def _closed(
    rows: Callable[..., Sequence[dict[str, Any]]], quote: Callable[[str], str], schemas: list[str]
) -> set[str]:
    """Return the schemas whose fence is closed, so that writes are refused.

    To find out, a query calls the function of each fence. All ``schemas`` must have this function.
    """
    closed: set[str] = set()
    for start in range(0, len(schemas), _BATCH):
        batch = schemas[start : start + _BATCH]
        calls = (f"{quote(schema)}.{quote(FUNCTION)}() s{n}" for n, schema in enumerate(batch))
        (row,) = rows(f"SELECT {', '.join(calls)}")
        closed.update(schema for n, schema in enumerate(batch) if row[f"s{n}"])
    return closed
