"""Schemas on the server of the run, each with a connection of Django's own backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

from django.db import connections
from django.db.utils import ConnectionHandler

from sharded_orm.backends.postgresql import snapshot
from sharded_orm.backends.snapshot import SchemaSnapshot
from tests.services.postgresql import Address

EXTENSIONS = "extensions"
_names = count(1)


def quoted(name: str) -> str:
    return '"{}"'.format(name.replace('"', '""'))


class Schemas:
    """Creates schemas in a database, and connects to them.

    The path of each connection is that of a shard: its schema, then the schema of the extensions.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._connections: dict[str, Any] = {}
        self._opened: list[Any] = []
        self.server = self.new_connection()

    def create(self, name: str = "") -> str:
        """Create an empty schema, and return its name."""
        name = name or f"schema_{next(_names):05d}"
        self.execute("", f"CREATE SCHEMA {quoted(name)}")
        self.connection(name)
        return name

    def connection(self, schema: str) -> Any:
        """Return a connection to ``schema``, which need not exist."""
        if schema not in self._connections:
            connection = self.new_connection()
            with connection.cursor() as cursor:
                cursor.execute(f"SET search_path TO {quoted(schema)}, {EXTENSIONS}")
            self._connections[schema] = connection
        return self._connections[schema]

    def execute(self, schema: str, sql: str, params: Any = None) -> list[Any]:
        connection = self.connection(schema) if schema else self.server
        with connection.cursor() as cursor:
            cursor.execute(sql, params)
            return list(cursor.fetchall()) if cursor.description else []

    def read(self, schema: str) -> SchemaSnapshot:
        with self.connection(schema).cursor() as cursor:
            return snapshot.read(cursor, schema)

    def build(self, schema: str, definitions: SchemaSnapshot) -> None:
        with self.connection(schema).cursor() as cursor:
            snapshot.build(cursor, definitions)

    def copy(self, schema: str) -> str:
        """Return the name of a new schema that is built from what ``schema`` shows."""
        name = self.create()
        self.build(name, self.read(schema))
        return name

    def close(self) -> None:
        for connection in self._opened:
            connection.close()
            del connections[connection.alias]

    def new_connection(self) -> Any:
        """Return a connection of its own, with the server's search path. Its alias is known to Django."""
        alias = f"schemas_{next(_names)}"
        handler = ConnectionHandler({"default": {}, alias: dict(self._settings)})
        connection: Any = handler.create_connection(alias)
        connections[alias] = connection
        self._opened.append(connection)
        return connection


@contextmanager
def schemas_on(address: Address, database: str) -> Iterator[Schemas]:
    """Create a database with extensions, and drop it in the end."""
    settings = {"ENGINE": "django.db.backends.postgresql", **address.django()}
    server = Schemas({**settings, "NAME": "postgres"})
    server.execute("", f"CREATE DATABASE {quoted(database)}")
    try:
        schemas = Schemas({**settings, "NAME": database})
        schemas.execute("", f"CREATE SCHEMA {EXTENSIONS}")
        for extension in ("hstore", "citext", "btree_gist", "pg_trgm"):
            schemas.execute("", f"CREATE EXTENSION {extension} SCHEMA {EXTENSIONS}")
        try:
            yield schemas
        finally:
            schemas.close()
    finally:
        server.execute("", f"DROP DATABASE {quoted(database)} WITH (FORCE)")
        server.close()
