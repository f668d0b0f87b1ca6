"""Read the definitions and the sizes of the tables in an SQLite file. Create tables from such
definitions.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from sharded_orm.backends.sizes import TableSize
from sharded_orm.backends.snapshot import OWN_PREFIX, SchemaSnapshot, applied_digest, kind_of
from sharded_orm.backends.statements import Effect

SUFFIX = ".sqlite3"
#: How many rows of a table are counted at most. SQLite has to read every row that it counts, so a
#: full count of a large table would take too long.
COUNTED = 100_000
_RECORDS = "django_migrations"
_ORDER = ("table", "index", "view", "trigger")
_WORD = re.compile(r"\s*([A-Za-z]+)")
_HARMLESS = {
    "SELECT",
    "PRAGMA",
    "EXPLAIN",
    "BEGIN",
    "COMMIT",
    "END",
    "ROLLBACK",
    "SAVEPOINT",
    "RELEASE",
}
_ROWS = {"INSERT", "UPDATE", "DELETE", "REPLACE", "WITH"}
_VIRTUAL = re.compile(r"CREATE\s+VIRTUAL\s+TABLE\b", re.IGNORECASE)


def read(connection: sqlite3.Connection) -> SchemaSnapshot:
    """Return the definitions of all tables, indexes, views and triggers in an SQLite file.

    Left out are the indexes that SQLite creates for constraints, because the definition of the
    table includes the constraints, and this library's own tables and triggers.
    """
    rows = connection.execute(
        "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite\\_%'"
        " ESCAPE '\\' ORDER BY name"
    )
    return SchemaSnapshot({name: sql for name, sql in rows if not name.startswith(OWN_PREFIX)})


def build(connection: sqlite3.Connection, snapshot: SchemaSnapshot) -> None:
    """Create the tables, indexes, … of ``snapshot`` that the file does not have yet, in one
    transaction.
    """
    present = set(read(connection).definitions)
    missing = [
        definition for name, definition in snapshot.definitions.items() if name not in present
    ]
    missing.sort(key=_rank)
    connection.execute("BEGIN IMMEDIATE")
    try:
        for definition in missing:
            connection.execute(definition)
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def digests(paths: Iterable[tuple[str, Path]]) -> dict[str, str | None]:
    """Return a dict that maps each alias to a digest of the applied migrations in its file.

    The digest is "" if the file has no table ``django_migrations``, and None if there is no file.

    :param paths: pairs (alias, path of the file).
    """
    return {alias: _digest(path) for alias, path in paths}


def names(folder: Path) -> set[str]:
    """Return the names of the shard files in ``folder``, without their suffix."""
    return {path.name.removesuffix(SUFFIX) for path in folder.glob(f"*{SUFFIX}")}


def effect_of(sql: str) -> Effect:
    """Return what the statement ``sql`` changes: nothing, rows or the schema. Only its first word
    is examined.
    """
    match = _WORD.match(sql)
    word = match[1].upper() if match else ""
    if word in _HARMLESS:
        return Effect.NOTHING
    return Effect.ROWS if word in _ROWS else Effect.SCHEMA


def _digest(path: Path) -> str | None:
    if not path.exists():
        return None
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    try:
        table = connection.execute(
            "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", [_RECORDS]
        )
        if table.fetchone() is None:
            return ""
        return applied_digest(connection.execute(f"SELECT app, name FROM {_RECORDS}"))
    finally:
        connection.close()


def table_sizes(path: Path) -> list[TableSize]:
    """Return the number of rows of each table in an SQLite file, sorted by the table's name.

    Counting stops at :data:`COUNTED` rows. The list is empty if there is no file.
    """
    if not path.exists():
        return []
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    try:
        names = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%'"
            " ESCAPE '\\' ORDER BY name"
        )
        return [_table_size(connection, name) for (name,) in names.fetchall()]
    finally:
        connection.close()


def _table_size(connection: sqlite3.Connection, name: str) -> TableSize:
    quoted = '"' + name.replace('"', '""') + '"'
    (rows,) = connection.execute(
        f"SELECT COUNT(*) FROM (SELECT 1 FROM {quoted} LIMIT {COUNTED + 1})"
    ).fetchone()
    if rows > COUNTED:
        return TableSize(name, COUNTED, "at least", None)
    return TableSize(name, rows, "exact", None)


def _rank(definition: str) -> int:
    # Create virtual tables before ordinary ones. A virtual table creates its shadow tables by
    # itself, and fails if they exist already.
    return _ORDER.index(kind_of(definition)) - bool(_VIRTUAL.match(definition))
