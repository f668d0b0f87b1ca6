"""The search path of a shard as SQL: its schema, and the schema that all shards of a database share."""

from __future__ import annotations

from sharded_orm.backends.postgresql.sql_quotes import literal, quoted

#: The schema for extensions, which all shards of a database share. It is in the search path of each.
EXTENSIONS = "extensions"


def guard_of(schema: str) -> str:
    """Return an expression that fails if ``schema`` does not exist, or may not be used.

    The server leaves such a schema out of the search path, and says nothing.
    """
    return f"1 / pg_catalog.has_schema_privilege({literal(schema)}, 'USAGE')::int"


def packet_of(prefix: list[bytes]) -> bytes:
    """Return the text of the statements ``prefix`` in the packet of another statement.

    Each has a line of its own, so the server's messages count lines from it.
    """
    return b";\n".join([*prefix, b""])


def search_path_of(schema: str) -> str:
    """Return the search path of ``schema``: the value of the setting ``search_path``."""
    return f"{quoted(schema)}, {quoted(EXTENSIONS)}"


def search_path_option(schema: str) -> str:
    """Return the text, for the option ``options`` of libpq, that sets the search path of a session."""
    path = search_path_of(schema).replace("\\", "\\\\").replace(" ", "\\ ")
    return f"-c search_path={path}"
