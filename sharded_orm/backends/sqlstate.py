"""SQLSTATE codes, which are the codes of errors in the SQL standard and in PostgreSQL.

An error is recognized by its code and not by its message, because the message depends on the
server's language.
"""

from __future__ import annotations

from typing import Final

SERIALIZATION_FAILURE: Final = "40001"
DEADLOCK: Final = "40P01"
#: A statement did not get a lock: at once with ``NOWAIT``, or otherwise within ``lock_timeout``.
LOCK_NOT_AVAILABLE: Final = "55P03"
#: A statement was cancelled by an administrator, or because it ran for too long.
QUERY_CANCELED: Final = "57014"
UNDEFINED_TABLE: Final = "42P01"
UNDEFINED_SCHEMA: Final = "3F000"
UNDEFINED_COLUMN: Final = "42703"


def sqlstate_of(error: BaseException) -> str:
    """Return the SQLSTATE of a psycopg error, or of a Django error that psycopg has caused.

    Return "" for errors of other drivers, and for errors that do not come from a server.
    """
    for candidate in (error, error.__cause__):
        state = getattr(candidate, "sqlstate", None)
        if isinstance(state, str):
            return state
    return ""
