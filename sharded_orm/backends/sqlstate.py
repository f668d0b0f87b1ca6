"""The SQLSTATE codes of errors, by which the SQL standard and PostgreSQL distinguish errors.

Messages are no substitute, because their text depends on the server's language.
"""

from __future__ import annotations

from typing import Final

SERIALIZATION_FAILURE: Final = "40001"
DEADLOCK: Final = "40P01"
#: A statement did not get a lock, either at once (``NOWAIT``) or before ``lock_timeout`` had passed.
LOCK_NOT_AVAILABLE: Final = "55P03"
#: A statement was cancelled, by an administrator or because it ran for too long.
QUERY_CANCELED: Final = "57014"
UNDEFINED_TABLE: Final = "42P01"
UNDEFINED_SCHEMA: Final = "3F000"


def sqlstate_of(error: BaseException) -> str:
    """Return the SQLSTATE of a psycopg error, or of the psycopg error that caused a Django error.

    Return "" for errors of other drivers, and for errors that do not come from a server.
    """
    for candidate in (error, error.__cause__):
        state = getattr(candidate, "sqlstate", None)
        if isinstance(state, str):
            return state
    return ""
