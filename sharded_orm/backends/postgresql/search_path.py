"""SQL for the search path of a shard: the shard's schema, then the schema that all shards share."""

from __future__ import annotations

from sharded_orm.backends.postgresql.sql_quotes import literal, quoted

#: The schema for extensions. All shards of a database share it, so it is in their search paths.
EXTENSIONS = "extensions"


def guard_of(schema: str) -> str:
    """Return an SQL expression that fails if ``schema`` does not exist or may not be used.

    Without this expression, the server would skip such a schema in the search path without an error.
    """
    return f"1 / pg_catalog.has_schema_privilege({literal(schema)}, 'USAGE')::int"


def packet_of(prefix: list[bytes]) -> bytes:
    """Return the text that stands before a statement in a packet: the statements ``prefix``.

    The text ends with a line end, so the server's messages count lines from the statement itself.
    """
    return b";\n".join([*prefix, b""])


def search_path_of(schema: str) -> str:
    """Return the value of the setting ``search_path`` for a shard in ``schema``."""
    return f"{quoted(schema)}, {quoted(EXTENSIONS)}"


def search_path_option(schema: str) -> str:
    """Return the value of libpq's option ``options`` that sets the search path of a session."""
    path = search_path_of(schema).replace("\\", "\\\\").replace(" ", "\\ ")
    return f"-c search_path={path}"
