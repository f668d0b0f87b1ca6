"""The kinds of databases that are measured, and the statements in which they differ."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from typing import Any, ClassVar

from tests.services import mariadb, postgresql
from tests.services.addresses import ServerAddress


class Database(ABC):
    """A kind of servers. Names of databases, schemas and tables are given without quotes."""

    name: ClassVar[str]
    #: The backend of Django, and ours.
    stock: ClassVar[str]
    ours: ClassVar[str]
    options: ClassVar[dict[str, Any]]
    #: The moment in the first expression, as many seconds later as the second one says.
    later: ClassVar[str]
    #: Statements after the rows are stored, so that the server has no work of that left.
    ready: ClassVar[tuple[str, ...]] = ()

    def connection(self, address: ServerAddress) -> dict[str, Any]:
        """Return how an alias or a node connects, without a database."""
        return {**address.django(), "OPTIONS": self.options, "CONN_MAX_AGE": None}

    def database(self, address: ServerAddress, name: str) -> dict[str, Any]:
        """Return the entry of ``DATABASES`` for the stock backend on the database ``name``."""
        return {"ENGINE": self.stock, "NAME": name, **self.connection(address)}

    def node(self, address: ServerAddress) -> dict[str, Any]:
        """Return the settings of a node."""
        return {"ENGINE": self.ours, **self.connection(address)}

    @abstractmethod
    def address(self, fields: dict[str, Any]) -> ServerAddress:
        """Return the address with these ``fields``."""

    @abstractmethod
    def server(self) -> AbstractContextManager[ServerAddress]:
        """Start a private server. (The one of MariaDB that the environment names is used instead.)"""

    @abstractmethod
    def stock_settings(self, shard: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of a stock alias for the tables of one shard.

        :param shard: the complete settings of our alias.
        """

    @abstractmethod
    def session(self, address: ServerAddress) -> AbstractContextManager[Any]:
        """Return a cursor of the driver, in autocommit, where all schemas can be named."""

    @abstractmethod
    def drop_database(self, name: str) -> str:
        """Return the statement that drops a database, if it exists."""

    @abstractmethod
    def drop_schema(self, name: str) -> str:
        """Return the statement that drops a schema with its tables, if it exists."""

    @abstractmethod
    def copy_table(self, source: str, target: str) -> str:
        """Return the statement that creates an empty table like another one, both with schema."""


class MariaDB(Database):
    """A shard is a database of the server."""

    name = "mariadb"
    stock = "django.db.backends.mysql"
    ours = "sharded_orm.backends.mysql"
    options: ClassVar[dict[str, Any]] = {
        "charset": "utf8mb4",
        "isolation_level": "read committed",
    }
    later = "{} + INTERVAL ({}) SECOND"

    def address(self, fields: dict[str, Any]) -> mariadb.Address:
        return mariadb.Address(**fields)

    @contextlib.contextmanager
    def server(self) -> Iterator[mariadb.Address]:
        if running := mariadb.addresses_from_environment():
            yield running[0]
            return
        with mariadb.servers(1) as (server,):
            yield server.address

    def stock_settings(self, shard: dict[str, Any]) -> dict[str, Any]:
        own = {key: value for key, value in shard.items() if key != "SHARD"}
        return {**own, "ENGINE": self.stock}

    @contextlib.contextmanager
    def session(self, address: ServerAddress) -> Iterator[Any]:
        import MySQLdb

        assert isinstance(address, mariadb.Address)
        with closing(MySQLdb.connect(**address.mysqldb(), autocommit=True)) as connection:
            yield connection.cursor()

    def drop_database(self, name: str) -> str:
        return f"DROP DATABASE IF EXISTS {name}"

    drop_schema = drop_database

    def copy_table(self, source: str, target: str) -> str:
        return f"CREATE TABLE {target} LIKE {source}"


class PostgreSQL(Database):
    """A shard is a schema. Stock Django reaches it by an alias whose sessions begin with its search path."""

    name = "postgresql"
    stock = "django.db.backends.postgresql"
    ours = "sharded_orm.backends.postgresql"
    options: ClassVar[dict[str, Any]] = {}
    later = "{} + ({}) * INTERVAL '1 second'"
    ready = ("VACUUM ANALYZE",)

    def address(self, fields: dict[str, Any]) -> postgresql.Address:
        return postgresql.Address(**fields)

    @contextlib.contextmanager
    def server(self) -> Iterator[postgresql.Address]:
        # Stock Django connects once for each shard, and 64 MB would not hold all tables. Autovacuum
        # would work during one turn, and not during the other. A session of ours reads all tables,
        # so it needs more open files than a session of one shard (docs/howto/use-postgresql.md).
        options = {
            "max_connections": "700",
            "shared_buffers": "512MB",
            "autovacuum": "off",
            "max_files_per_process": "8000",
        }
        with postgresql.servers(1, **options) as (server,):
            yield server.address

    def node(self, address: ServerAddress) -> dict[str, Any]:
        return {**super().node(address), "NAME": postgresql.DATABASE}

    def stock_settings(self, shard: dict[str, Any]) -> dict[str, Any]:
        own = {key: value for key, value in shard.items() if key not in ("SHARD", "SCHEMA", "POOL")}
        options = {**shard["OPTIONS"], "options": f"-c search_path={shard['SCHEMA']}"}
        return {**own, "ENGINE": self.stock, "OPTIONS": options}

    @contextlib.contextmanager
    def session(self, address: ServerAddress) -> Iterator[Any]:
        import psycopg

        assert isinstance(address, postgresql.Address)
        connect = psycopg.connect(**address.psycopg(postgresql.DATABASE), autocommit=True)
        with connect as connection:
            yield connection.cursor()

    def drop_database(self, name: str) -> str:
        return f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"

    def drop_schema(self, name: str) -> str:
        return f"DROP SCHEMA IF EXISTS {name} CASCADE"

    def copy_table(self, source: str, target: str) -> str:
        return f"CREATE TABLE {target} (LIKE {source} INCLUDING ALL)"


DATABASES: dict[str, Database] = {kind.name: kind for kind in (MariaDB(), PostgreSQL())}
