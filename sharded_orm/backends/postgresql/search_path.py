"""SQL for the search path of a shard: its own schema, then the schema of extensions that all shards
share.
"""

from __future__ import annotations

from sharded_orm.backends.postgresql.sql_quotes import literal, quoted

#: The name of the schema for extensions. All shards of a database share it, so it is in the search
#: path of each shard.
EXTENSIONS = "extensions"


def guard_of(schema: str) -> str:
    """Return an SQL expression that fails if ``schema`` does not exist or may not be used.

    Without it, the server would simply skip such a schema in the search path, and find or create
    tables in the next one.
    """
    return f"1 / pg_catalog.has_schema_privilege({literal(schema)}, 'USAGE')::int"


def packet_of(prefix: list[bytes]) -> bytes:
    """Join the statements ``prefix``, to put them before another statement in the same packet.

    The text ends with a line break, so that the other statement begins on a line of its own. In the
    server's messages about it, line numbers can then be corrected.
    """
    return b";\n".join([*prefix, b""])


def search_path_of(schema: str) -> str:
    """Return the value of the setting ``search_path`` for a shard in ``schema``."""
    return f"{quoted(schema)}, {quoted(EXTENSIONS)}"


def search_path_option(schema: str) -> str:
    """Return a value for libpq's parameter ``options`` with which a session gets the search path of
    ``schema`` when it connects.
    """
    path = search_path_of(schema).replace("\\", "\\\\").replace(" ", "\\ ")
    return f"-c search_path={path}"
