"""Take and release advisory locks on schemas. A lock also ends when its session ends."""

from __future__ import annotations

from hashlib import sha256

from sharded_orm.backends.postgresql.catalog import CatalogCursor
from sharded_orm.backends.sqlstate import LOCK_NOT_AVAILABLE, sqlstate_of


def take(cursor: CatalogCursor, schema: str, seconds: float) -> bool:
    """Take the lock on ``schema`` for the session of ``cursor``. Must not be called in a
    transaction.

    Return False if another session still holds the lock after ``seconds``. A session that has taken
    the lock several times must release it as often.
    """
    key = _key(schema)
    milliseconds = int(seconds * 1000)
    if milliseconds <= 0:
        cursor.execute("SELECT pg_try_advisory_lock(%(key)s)", {"key": key})
        ((is_taken,),) = cursor.fetchall()
        return bool(is_taken)
    try:
        # One statement sets the time limit and takes the lock. In autocommit it is a transaction by
        # itself, and the limit ends with it. OFFSET 0 keeps the planner from merging the two
        # queries, so that the limit is set before pg_advisory_lock() is called.
        cursor.execute(
            "SELECT pg_advisory_lock(%(key)s)"
            " FROM (SELECT set_config('lock_timeout', %(timeout)s, true) AS value OFFSET 0) AS timeout"
            " WHERE timeout.value <> ''",
            {"key": key, "timeout": f"{milliseconds}ms"},
        )
        cursor.fetchall()
    except Exception as exc:
        if sqlstate_of(exc) != LOCK_NOT_AVAILABLE:
            raise
        return False
    return True


def release(cursor: CatalogCursor, schema: str) -> None:
    """Release the lock on ``schema``. The session of ``cursor`` must hold it."""
    cursor.execute("SELECT pg_advisory_unlock(%(key)s)", {"key": _key(schema)})
    cursor.fetchall()


def _key(schema: str) -> int:
    # The key is made from the name of the schema alone. It need not contain the name of the
    # database, because each database has advisory locks of its own.
    digest = sha256(f"sharded_orm:{schema}".encode()).digest()
    return int.from_bytes(digest[:8], signed=True)
