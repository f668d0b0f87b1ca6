"""What differs between the databases of these tests. Uses the library only where it says so."""

from __future__ import annotations

import contextlib
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from tests.services import mariadb, postgresql
from tests.services.addresses import ServerAddress
from tests.services.server import PrivateServer

#: Account and password of writers.
WRITERS = ("writer", "secret")


class FaultDatabase(ABC):
    """One server, for the processes of these tests."""

    #: SQL for the number of the own session.
    session_number: ClassVar[str]

    @staticmethod
    @abstractmethod
    def server() -> PrivateServer:
        """Return a server that is not running yet."""

    @abstractmethod
    def prepare(self, global_schema: str) -> None:
        """Create the account of writers, and the schema of the global database."""

    @abstractmethod
    def node(self) -> dict[str, Any]:
        """Return the settings of the node."""

    @abstractmethod
    def global_alias(self, global_schema: str) -> dict[str, Any]:
        """Return the entry of ``DATABASES`` for the global database."""

    @abstractmethod
    def connect(self) -> Any:
        """Open a session in autocommit that the library knows nothing of."""

    @abstractmethod
    def kill_session(self, number: int) -> None: ...

    @abstractmethod
    def solo_triggers(self, table: str, solo: int, owner: str, mine: str) -> Iterator[str]:
        """Yield the statements for triggers that record the writes of a writer without transact().

        :param owner: SQL for the number of the row's owner; ``{row}`` stands for the row.
        :param mine: the beginning of a condition that selects rows of this owner; the same.
        """

    @abstractmethod
    def commits(self) -> tuple[type[Any], Callable[[Any, Any], bool]]:
        """Return the library's class whose ``_end()`` ends a transaction, and a function of its object
        and of the argument: whether that sends COMMIT."""

    @abstractmethod
    def send_commit_and_die(self) -> None:
        """Let the process die when it has sent the next COMMIT, before the answer."""


class MariaDB(FaultDatabase):
    session_number = "CONNECTION_ID()"
    _trigger = """
CREATE TRIGGER solo_{event} AFTER {event} ON {table} FOR EACH ROW
IF {row}.lane = {solo} THEN
    UPDATE truth SET epoch = epoch + 1 WHERE owner = {owner} AND lane = {solo};
    SELECT CONCAT('[', COALESCE(GROUP_CONCAT(
            JSON_ARRAY(item_id, album_id, shown, stamp) ORDER BY item_id SEPARATOR ','), ''), ']')
        INTO @state FROM {table} WHERE {mine}lane = {solo} LOCK IN SHARE MODE;
    UPDATE truth SET state = @state WHERE owner = {owner} AND lane = {solo};
    INSERT INTO history SELECT owner, lane, epoch, state FROM truth
        WHERE owner = {owner} AND lane = {solo};
END IF
"""

    def __init__(self, address: mariadb.Address) -> None:
        self._address = address

    @staticmethod
    def server() -> PrivateServer:
        # A transaction soon stops waiting for one that a test has stopped.
        return mariadb.MariaDBServer(innodb_lock_wait_timeout="2")

    def prepare(self, global_schema: str) -> None:
        account, password = WRITERS
        with contextlib.closing(self.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(f"CREATE USER {account} IDENTIFIED BY '{password}'")
            cursor.execute(f"GRANT ALL PRIVILEGES ON *.* TO {account}")
            cursor.execute(f"CREATE DATABASE {global_schema}")

    def node(self) -> dict[str, Any]:
        return {
            "ENGINE": "sharded_orm.backends.mysql",
            "OPTIONS": {"charset": "utf8mb4", "isolation_level": "read committed"},
            **self._address.django(),
        }

    def global_alias(self, global_schema: str) -> dict[str, Any]:
        return {**self.node(), "NAME": global_schema}

    def connect(self) -> Any:
        import MySQLdb

        return MySQLdb.connect(**self._address.mysqldb(), autocommit=True)

    def kill_session(self, number: int) -> None:
        import MySQLdb

        with contextlib.closing(self.connect()) as connection:
            # The session may be gone already.
            with contextlib.suppress(MySQLdb.OperationalError):
                connection.cursor().execute(f"KILL {number}")

    def solo_triggers(self, table: str, solo: int, owner: str, mine: str) -> Iterator[str]:
        for event, row in _EVENTS:
            # It reads the rows under lock: an earlier snapshot would lack the rows that another writer
            # commits while this one waits.
            yield self._trigger.format(
                event=event, row=row, table=table, solo=solo, owner=owner.format(row=row),
                mine=mine.format(row=row),
            )  # fmt: skip

    def commits(self) -> tuple[type[Any], Callable[[Any, Any], bool]]:
        from sharded_orm.backends.mysql.connection import VirtualConnection

        return VirtualConnection, lambda c, how: how == b"COMMIT" and c.transaction.is_open

    def send_commit_and_die(self) -> None:
        from sharded_orm.backends.mysql.session import NodeSession

        def run(session: Any, *statements: bytes) -> None:
            session.raw.send_query(b"; ".join(statements))
            os.kill(os.getpid(), signal.SIGKILL)

        NodeSession.run = run  # type: ignore[method-assign]


class PostgreSQL(FaultDatabase):
    session_number = "pg_backend_pid()"
    # Each statement of the function sees what others have committed while the one before waited.
    _trigger = """
CREATE FUNCTION solo_{event}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
IF {row}.lane = {solo} THEN
    UPDATE truth SET epoch = epoch + 1 WHERE owner = {owner} AND lane = {solo};
    UPDATE truth SET state = (
        SELECT '[' || coalesce(string_agg(
            json_build_array(item_id, album_id, shown, stamp)::text, ',' ORDER BY item_id), '') || ']'
        FROM {table} WHERE {mine}lane = {solo}
    ) WHERE owner = {owner} AND lane = {solo};
    INSERT INTO history SELECT owner, lane, epoch, state FROM truth
        WHERE owner = {owner} AND lane = {solo};
END IF;
RETURN NULL;
END $$
"""

    def __init__(self, address: postgresql.Address) -> None:
        self._address = address

    @staticmethod
    def server() -> PrivateServer:
        # A transaction soon stops waiting for one that a test has stopped.
        return postgresql.PostgreSQLServer(lock_timeout="2s", deadlock_timeout="100ms")

    def prepare(self, global_schema: str) -> None:
        account, password = WRITERS
        with contextlib.closing(self.connect()) as connection:
            connection.execute(f"CREATE ROLE {account} LOGIN PASSWORD '{password}'")
            connection.execute(f"GRANT {postgresql.SUPERUSER} TO {account}")
            connection.execute(f"CREATE SCHEMA {global_schema}")

    def node(self) -> dict[str, Any]:
        from django.db.backends.postgresql.psycopg_any import IsolationLevel

        level = {"isolation_level": IsolationLevel.READ_COMMITTED}
        return self._address.node(OPTIONS=level)

    def global_alias(self, global_schema: str) -> dict[str, Any]:
        node = self.node()
        options = {**node["OPTIONS"], "options": f"-c search_path={global_schema}"}
        return {**node, "OPTIONS": options}

    def connect(self) -> Any:
        import psycopg

        return psycopg.connect(**self._address.psycopg(postgresql.DATABASE), autocommit=True)

    def kill_session(self, number: int) -> None:
        with contextlib.closing(self.connect()) as connection:
            connection.execute(f"SELECT pg_terminate_backend({number})")

    def solo_triggers(self, table: str, solo: int, owner: str, mine: str) -> Iterator[str]:
        for event, row in _EVENTS:
            yield self._trigger.format(
                event=event, row=row, table=table, solo=solo, owner=owner.format(row=row),
                mine=mine.format(row=row),
            )  # fmt: skip
            yield (
                f"CREATE TRIGGER solo_{event} AFTER {event} ON {table} FOR EACH ROW"
                f" EXECUTE FUNCTION solo_{event}()"
            )

    def commits(self) -> tuple[type[Any], Callable[[Any, Any], bool]]:
        from sharded_orm.backends.postgresql.connection import PostgreSQLConnection

        return PostgreSQLConnection, lambda c, how: how == "commit" and c.is_open

    def send_commit_and_die(self) -> None:
        import psycopg

        def commit(connection: Any) -> None:
            connection.pgconn.send_query(b"COMMIT")
            connection.pgconn.flush()
            os.kill(os.getpid(), signal.SIGKILL)

        psycopg.Connection.commit = commit  # type: ignore[method-assign]


_EVENTS = (("INSERT", "NEW"), ("UPDATE", "NEW"), ("DELETE", "OLD"))
KINDS: dict[str, type[FaultDatabase]] = {"mariadb": MariaDB, "postgresql": PostgreSQL}


def database_at(address: ServerAddress) -> FaultDatabase:
    """Return the database of the server at ``address``, with the account there."""
    if isinstance(address, postgresql.Address):
        return PostgreSQL(address)
    assert isinstance(address, mariadb.Address)
    return MariaDB(address)
