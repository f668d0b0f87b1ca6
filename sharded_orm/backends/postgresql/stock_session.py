"""Sessions of Django's own backend, for copying rows of a shard and moving its tables.

They are not taken from a pool, because their settings are changed until they end.
"""

from __future__ import annotations

from typing import Any, Final

from django.db import OperationalError

# Settings of a session that copies rows or moves tables. The trigger functions in
# :mod:`~sharded_orm.backends.postgresql.capture_triggers` use the same formats, because equal values
# must have equal texts.
_SETTINGS: Final = (
    "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE",
    # With these formats, equal values have the same text on all servers, and no digits are lost.
    "SET DateStyle = 'ISO, YMD'",
    "SET IntervalStyle = 'postgres'",
    "SET TimeZone = 'UTC'",
    "SET extra_float_digits = 3",
    "SET bytea_output = 'hex'",
    "SET lc_monetary = 'C'",
    "SET xmloption = 'content'",
    # Make a statement fail if row security would hide rows from it.
    "SET row_security = off",
)


def begin_session(connection: Any) -> str:
    """Connect, change the settings of the session, and return the name of its schema.

    :param connection: a connection object of Django's own backend that has not connected yet, and is
        used for nothing else. Its sessions come from no pool, because their settings are changed until
        they end.
    :raises django.db.OperationalError: the first schema of the search path does not exist.
    """
    options = connection.settings_dict["OPTIONS"]
    for name in ("pool", "server_side_binding", "isolation_level"):
        options.pop(name, None)
    with connection.cursor() as cursor:
        # Check the schema before anything else. If a shard's schema is missing, its tables must not be
        # created in another schema of the search path.
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
    # The default path begins with "$user". Accept it, because no schema with the account's name
    # need exist.
    return first.startswith(('"$user"', quoted)) or first.partition(",")[0].strip() == schema
