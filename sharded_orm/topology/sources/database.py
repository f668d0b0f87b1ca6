"""The topology source in the global database, for sites that have no ZooKeeper.

The first publication makes two tables::

    sharded_orm_topology          one of the latest versions of the document per row, with author, time
                                  and comment. The row with the highest id is the current document.
    sharded_orm_topology_process  one process per row, with the version that it uses

The tables are no models, and no migration makes them: Django needs the topology before it can load
models or migrate. For the same reason the source has connections of its own.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from django.apps import apps
from django.conf import settings
from django.db import Error, IntegrityError, models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.sql import Query
from django.db.utils import load_backend

from sharded_orm.database_clock import DatabaseClock
from sharded_orm.exceptions import (
    InvalidConfiguration,
    InvalidTopology,
    TopologyConflict,
    TopologyError,
    TopologyUnavailable,
)
from sharded_orm.forks import identity
from sharded_orm.topology.aliases import GROUP_ENGINE, complete
from sharded_orm.topology.document import Document
from sharded_orm.topology.sources.base import (
    OnChange,
    Process,
    Revision,
    TopologySource,
    arrived,
    author,
    parsed_time,
    positive,
)

logger = logging.getLogger("sharded_orm.topology")

VERSIONS = "sharded_orm_topology"
PROCESSES = "sharded_orm_topology_process"
_COLUMNS: Mapping[str, Mapping[str, models.Field[Any, Any]]] = {
    VERSIONS: {
        "id": models.BigIntegerField(),
        "version": models.BigIntegerField(),
        "published_at": models.CharField(max_length=40),
        "author": models.CharField(max_length=255),
        "comment": models.TextField(),
        "document": models.TextField(),
    },
    PROCESSES: {
        "name": models.CharField(max_length=255),
        "host": models.CharField(max_length=255),
        "pid": models.BigIntegerField(),
        "version": models.BigIntegerField(),
        "since": models.CharField(max_length=40),
        # The time of the last sign of life, by the clock of the database.
        "seen": models.DateTimeField(),
    },
}
# Seconds that the watching thread waits after an error that is no error of the database.
_RECOVER_AFTER = 5.0
# Seconds between two looks whether Django has loaded the applications.
_UNTIL_READY = 0.02
# The most seconds that stop() waits for the end of the watching thread. Then stop() returns anyway.
_END_WITHIN = 3.0


class DatabaseSource(TopologySource):
    """A topology source that keeps the document in a table. The module's docstring describes the tables.

    A background thread asks every ``INTERVAL`` seconds (default 1) for the id of the newest row, and
    reads a new document. It also gives a sign of life every third of ``TIMEOUT`` seconds (default
    15). A process without a sign of life for ``TIMEOUT`` seconds counts as ended. So code that uses
    the topology never waits for the database.

    Cost, for each process: one query per ``INTERVAL``, one write per sign of life. The thread's
    connection is kept for as long as ``CONN_MAX_AGE`` of the alias says.
    """

    writable: ClassVar[bool] = True
    option_names = frozenset({"ALIAS", "INTERVAL", "TIMEOUT", "HISTORY"})

    def __init__(self, options: Mapping[str, Any], setting: Mapping[str, Any]) -> None:
        super().__init__(options, setting)
        problems: list[str] = []
        self._alias = options.get("ALIAS", "default")
        self._interval = positive("INTERVAL", options.get("INTERVAL", 1.0), problems)
        self._timeout = positive("TIMEOUT", options.get("TIMEOUT", 15.0), problems)
        self._kept = int(positive("HISTORY", options.get("HISTORY", 100), problems))
        if self._timeout <= self._interval:
            problems.append(
                f"TOPOLOGY: TIMEOUT must be more than INTERVAL, not {self._timeout!r} and"
                f" {self._interval!r}"
            )
        # The method of dict, because that of ShardedDatabases would ask this source for the groups.
        databases = {
            alias: entry
            for alias, entry in dict.items(settings.DATABASES)
            if entry.get("ENGINE") != GROUP_ENGINE
        }
        if self._alias not in [*databases]:
            problems.append(
                f"TOPOLOGY: ALIAS must be one of {sorted(databases)!r}, not {self._alias!r}"
            )
        if problems:
            raise InvalidConfiguration(problems)
        # A copy: a test run gives the alias another database, and this source stays where it is.
        self._database = complete(databases[self._alias])
        self._process = identity()
        self._name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._thread: threading.Thread | None = None
        # The connection of the watching thread. It is kept here, so that a forked child does not
        # finalise it.
        self._connection: BaseDatabaseWrapper | None = None
        self._ended = threading.Event()
        self._wake = threading.Event()
        self._lost = False
        #: The id of the row that was reported last; None before the first report.
        self._reported: int | None = None
        self._version = 0
        self._since = datetime.now(UTC)
        #: The version in this process's row, and the time of its next sign of life by
        #: time.monotonic(); None if there is no such row.
        self._announced: tuple[int, float] | None = None

    def describe(self) -> str:
        return f"the table {VERSIONS!r} of the database {self._alias!r}"

    # ##### Reading and writing, in the thread of the caller #####

    def load(self) -> Document | None:
        with self._connected() as connection:
            current = _current(connection)
        return None if current is None else Document.from_json(current[1])

    def publish(self, document: Document, *, expected: int, comment: str = "") -> None:
        with self._connected() as connection:
            _create_tables(connection)
            current = _current(connection)
            version = 0 if current is None else _version_of(current[1])
            # A row that is no document may be replaced, whatever version is expected.
            if version is not None and version != expected:
                raise TopologyConflict(
                    f"{self.describe()} holds version {version} by now, not {expected} any more;"
                    " nothing was published."
                )
            new = 1 if current is None else current[0] + 1
            values = {
                "id": new,
                "version": document.version,
                "published_at": datetime.now(UTC).isoformat(),
                "author": author(),
                "comment": comment,
                "document": document.to_json(),
            }
            try:
                # The primary key lets only one of several processes replace the current row.
                _insert(connection, VERSIONS, values)
            except IntegrityError as exc:
                raise TopologyConflict(
                    f"{self.describe()} was changed by somebody else at this moment; nothing was"
                    " published."
                ) from exc
            _execute(connection, f"DELETE FROM {VERSIONS} WHERE id <= %s", [new - self._kept])
        self._wake.set()

    def history(self, limit: int) -> list[Revision]:
        columns = "version, published_at, author, comment"
        with self._connected() as connection:
            if not _has_tables(connection):
                return []
            rows = _execute(
                connection, f"SELECT {columns} FROM {VERSIONS} ORDER BY id DESC LIMIT %s", [limit]
            )
        return [
            Revision(version, parsed_time(published_at), by, comment)
            for version, published_at, by, comment in rows
        ]

    def revision(self, version: int) -> Document:
        with self._connected() as connection:
            rows = []
            if _has_tables(connection):
                sql = f"SELECT document FROM {VERSIONS} WHERE version = %s ORDER BY id DESC"
                rows = _execute(connection, sql, [version])
        if not rows:
            raise LookupError(f"{self.describe()} keeps no version {version!r}.")
        return Document.from_json(rows[0][0])

    def processes(self) -> list[Process]:
        with self._connected() as connection:
            if not _has_tables(connection):
                return []
            return [
                Process(host, pid, version, parsed_time(since), name == self._name)
                for name, host, pid, version, since, age in _processes(connection)
                if age < timedelta(seconds=self._timeout)
            ]

    @contextmanager
    def _connected(self) -> Iterator[BaseDatabaseWrapper]:
        """Return a context manager that gives a connection of its own to a ``with`` block.

        A transaction of the caller neither hides what the block reads nor rolls back what it writes.
        Errors of the database inside the block become :exc:`TopologyUnavailable`.
        """
        connection = self._new_connection()
        try:
            with _without_warning():
                yield connection
        except TopologyError:
            raise
        except Error as exc:
            raise TopologyUnavailable(
                f"{self.describe()} does not answer as it should: {type(exc).__name__}: {exc}".rstrip(
                    "."
                )
                + "."
            ) from exc
        finally:
            connection.close()

    def _new_connection(self) -> BaseDatabaseWrapper:
        backend = load_backend(self._database["ENGINE"])
        connection: BaseDatabaseWrapper = backend.DatabaseWrapper(self._database, self._alias)
        return connection

    # ##### Watching, in a thread of its own #####

    def start(self, on_change: OnChange) -> None:
        self._thread = threading.Thread(
            target=self._follow, args=(on_change,), name="topology-database", daemon=True
        )
        self._thread.start()

    def using(self, version: int) -> None:
        self._version, self._since = version, datetime.now(UTC)
        self._wake.set()

    def stop(self) -> None:
        if self._process != identity():
            return  # This is a forked child, which must not write to its parent's socket.
        self._ended.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            # Wait for a limited time only: the thread may wait for an answer that never comes.
            self._thread.join(_END_WITHIN)

    def _follow(self, on_change: OnChange) -> None:
        while not apps.ready:  # See _without_warning().
            if self._ended.wait(_UNTIL_READY):
                return
        # A connection belongs to the thread that has made it.
        connection = self._connection = self._new_connection()
        while not self._ended.is_set():
            self._wake.clear()
            pause = self._interval
            try:
                self._step(connection, on_change)
            except Error as exc:
                self._note_loss(exc)
                connection.close()
            except Exception:
                # This thread must survive any error, because no other thread watches the document.
                logger.exception("Following %s failed, and goes on.", self.describe())
                pause = _RECOVER_AFTER
            self._wake.wait(pause)
        with suppress(Exception):
            # Other processes see at once that this one has ended. If it cannot tell, they see it
            # when its last sign of life is old.
            _execute(connection, f"DELETE FROM {PROCESSES} WHERE name = %s", [self._name])
        connection.close()

    def _step(self, connection: BaseDatabaseWrapper, on_change: OnChange) -> None:
        """Report the current document if it is new. Then tell which version this process uses."""
        newest = _newest(connection)
        if newest is not None and newest != self._reported:
            current = _current(connection)
            if current is not None:
                text = current[1]
                if (document := arrived(lambda: Document.from_json(text))) is not None:
                    on_change(document)
                self._reported = current[0]
        if self._lost:
            logger.info("%s answers again.", self.describe())
            self._lost = False
        if newest is not None:
            self._announce(connection)
        connection.close_if_unusable_or_obsolete()

    def _note_loss(self, exc: Error) -> None:
        if not self._lost:
            self._lost = True
            logger.warning(
                "%s is lost; this process goes on with version %d of the topology. (%s)",
                self.describe(), self._version, exc,
            )  # fmt: skip

    def _announce(self, connection: BaseDatabaseWrapper) -> None:
        version, now = self._version, time.monotonic()
        if self._announced is not None:
            announced, next_sign = self._announced
            if announced == version and now < next_sign:
                return
        values = {
            "name": self._name,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": version,
            "since": self._since.isoformat(),
        }
        try:
            sets = ", ".join(f"{column} = %s" for column in values)
            clock = _clock(connection)
            sql = f"UPDATE {PROCESSES} SET {sets}, seen = {clock} WHERE name = %s"
            if not _change(connection, sql, [*values.values(), self._name]):
                self._remove_ended(connection)
                _insert(connection, PROCESSES, values, seen=clock)
        except Error as exc:
            if self._announced is None or self._announced[0] != version:
                logger.info(
                    "%s does not allow this process to tell its version: %s", self.describe(), exc
                )
            connection.close()
        self._announced = version, now + self._timeout / 3

    def _remove_ended(self, connection: BaseDatabaseWrapper) -> None:
        """Delete the rows of processes that have given no sign of life for a long time."""
        for name, *_, age in _processes(connection):
            if age > timedelta(seconds=10 * self._timeout):
                _execute(connection, f"DELETE FROM {PROCESSES} WHERE name = %s", [name])


@contextmanager
def _without_warning() -> Iterator[None]:
    """Silence Django's warning about queries while the applications are loaded (CursorWrapper._execute).

    The topology is needed at that time. Only the thread that loads the applications needs this: the
    filters of warnings belong to all threads.
    """
    if apps.ready:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the database during app initialization")
        yield


# ##### Statements #####


def _execute(connection: BaseDatabaseWrapper, sql: str, parameters: list[Any]) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return list(cursor.fetchall()) if cursor.description else []


def _change(connection: BaseDatabaseWrapper, sql: str, parameters: list[Any]) -> int:
    """Run a statement that writes. Return the number of rows that it has found."""
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return int(cursor.rowcount)


def _insert(
    connection: BaseDatabaseWrapper, table: str, values: Mapping[str, Any], **expressions: str
) -> None:
    columns = ", ".join([*values, *expressions])
    row = ", ".join([*("%s" for _ in values), *expressions.values()])
    _execute(connection, f"INSERT INTO {table} ({columns}) VALUES ({row})", [*values.values()])


def _has_tables(connection: BaseDatabaseWrapper) -> bool:
    with connection.cursor() as cursor:
        return PROCESSES in connection.introspection.table_names(cursor)


def _create_tables(connection: BaseDatabaseWrapper) -> None:
    if _has_tables(connection):
        return
    for table, fields in _COLUMNS.items():
        columns = [f"{name} {field.db_type(connection)} NOT NULL" for name, field in fields.items()]
        columns[0] += " PRIMARY KEY"
        _execute(connection, f"CREATE TABLE IF NOT EXISTS {table} ({', '.join(columns)})", [])


def _newest(connection: BaseDatabaseWrapper) -> int | None:
    """Return the id of the current row; None if nothing was published."""
    try:
        ((newest,),) = _execute(connection, f"SELECT MAX(id) FROM {VERSIONS}", [])
    except Error:
        if _has_tables(connection):
            raise
        return None
    return None if newest is None else int(newest)


def _current(connection: BaseDatabaseWrapper) -> tuple[int, str] | None:
    """Return the id and the document of the current row; None if nothing was published."""
    newest = _newest(connection)
    if newest is None:
        return None
    rows = _execute(connection, f"SELECT id, document FROM {VERSIONS} WHERE id = %s", [newest])
    # The row is gone if others have published very often since.
    return (rows[0][0], rows[0][1]) if rows else _current(connection)


def _processes(connection: BaseDatabaseWrapper) -> list[tuple[Any, ...]]:
    """Return for each process its name, host, pid, version, since when, and the age of its last sign."""
    columns = "name, host, pid, version, since"
    rows = _execute(
        connection,
        f"SELECT {columns}, seen, {_clock(connection)} FROM {PROCESSES} ORDER BY host, pid",
        [],
    )
    return [(*row[:-2], _moment(row[-1]) - _moment(row[-2])) for row in rows]


def _clock(connection: BaseDatabaseWrapper) -> str:
    """Return SQL for the present time by the clock of the database."""
    compiler = Query(None).get_compiler(connection=connection)
    return str(compiler.compile(DatabaseClock())[0])


def _moment(value: Any) -> datetime:
    # Some drivers return text. Both times of a subtraction come in the same form.
    return value if isinstance(value, datetime) else datetime.fromisoformat(value)


def _version_of(text: str) -> int | None:
    """Return the version of the document in ``text``; None if ``text`` is not a document."""
    try:
        return Document.from_json(text).version
    except InvalidTopology:
        return None
