"""Recognizes the errors of a statement that names a table or a column which does not exist.

Also the remedy for the missing schema or file of a shard.
"""

from __future__ import annotations

import re
from typing import Final

from sharded_orm.backends.sqlstate import (
    UNDEFINED_COLUMN,
    UNDEFINED_SCHEMA,
    UNDEFINED_TABLE,
    sqlstate_of,
)

# ER_BAD_DB_ERROR and ER_NO_SUCH_TABLE
_TABLE: Final = frozenset({1049, 1146})
# ER_BAD_FIELD_ERROR
_COLUMN: Final = 1054
# The beginning of SQLite's error message for a missing table.
_SQLITE_TABLE: Final = "no such table: "
# Matches SQLite's error messages for a missing column; the second is that of an INSERT.
_SQLITE_COLUMN: Final = re.compile(r"no such column: |table \S+ has no column named ")


def is_missing_table(error: BaseException) -> bool:
    """Whether ``error``, of a driver or of Django, means that a table or schema does not exist."""
    if state := sqlstate_of(error):
        return state in (UNDEFINED_TABLE, UNDEFINED_SCHEMA)
    first = error.args[0] if error.args else None
    if isinstance(first, str):
        return first.startswith(_SQLITE_TABLE)
    return first in _TABLE


def is_missing_column(error: BaseException) -> bool:
    """Whether ``error``, of a driver or of Django, means that a column does not exist."""
    if state := sqlstate_of(error):
        return state == UNDEFINED_COLUMN
    first = error.args[0] if error.args else None
    if isinstance(first, str):
        return _SQLITE_COLUMN.match(first) is not None
    return first == _COLUMN


def creation_remedy(alias: str) -> str:
    """Return the beginning of a sentence: how to create the schema or file of the shard ``alias``."""
    return (
        "Create all that are missing with 'manage.py migrate_shards --create', or this one with"
        f" 'manage.py migrate --database {alias}'"
    )
