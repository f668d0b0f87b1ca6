"""Sessions of Django's own backend, for copying rows of a shard and moving its tables.

They do not come from a pool, because their settings stay changed until they end.
"""

from __future__ import annotations

from typing import Any, Final

from django.db import OperationalError

# Settings of a session that copies rows or moves tables. The trigger functions in
# :mod:`~sharded_orm.backends.postgresql.capture_triggers` write values in the same formats, because
# the texts of equal values must be equal.
_SETTINGS: Final = (
    "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE",
    # With these formats, equal values have the same text on all servers, and numbers keep all
    # digits.
    "SET DateStyle = 'ISO, YMD'",
    "SET IntervalStyle = 'postgres'",
    "SET TimeZone = 'UTC'",
    "SET extra_float_digits = 3",
    "SET bytea_output = 'hex'",
    "SET lc_monetary = 'C'",
    "SET xmloption = 'content'",
    # If row security hides rows from the account, raise an error rather than leave them out.
    "SET row_security = off",
)


def begin_session(connection: Any) -> str:
    """Open the session of ``connection``, change its settings, and return the name of its schema.

    :param connection: a connection object of Django's own backend that has not connected yet.
        Nothing else may use it, because the settings stay changed.
    :raises django.db.OperationalError: the first schema of the search path does not exist.
    """
    options = connection.settings_dict["OPTIONS"]
    for name in ("pool", "server_side_binding", "isolation_level"):
        options.pop(name, None)
    with connection.cursor() as cursor:
        # Check the schema first. If a shard's schema is missing, the next schema of the search path
        # would be the current one, and the shard's tables would be created there.
        cursor.execute(
            "SELECT pg_catalog.current_schema(), pg_catalog.current_setting('search_path')"
        )
        ((schema, path),) = cursor.fetchall()
        if schema is None or not _begins_with(path, schema):
            connection.close()
            raise OperationalError(
                f"The schema of {connection.alias!r} does not exist, or its account may not use it (its"
                f" search_path is {path!r}). Create it ('manage.py migrate_shards --create'), or grant"
                " the account USAGE on it."
            )
        for statement in _SETTINGS:
            cursor.execute(statement)
    return str(schema)


def _begins_with(path: str, schema: str) -> bool:
    quoted = '"' + schema.replace('"', '""') + '"'
    first = path.lstrip()
    # Also accept a path that begins with "$user", as the server's default does. Usually no schema
    # has the name of the account, so the current schema is a later one of the path.
    return first.startswith(('"$user"', quoted)) or first.partition(",")[0].strip() == schema
