"""The topology source in the global database, for sites that have no ZooKeeper.

The first publication creates two tables::

    sharded_orm_topology          one row for each of the latest versions of the document, with its
                                  author, time and comment. The current one has the highest id.
    sharded_orm_topology_process  one row for each process, with the version that it uses

Django needs the topology before it can load models, so the source opens its own connections.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, TypeVar

from django.apps import apps
from django.conf import settings
from django.db import Error, IntegrityError
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import load_backend

from sharded_orm.exceptions import (
    InvalidConfiguration,
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
    version_of,
)
from sharded_orm.topology.sources.database_tables import (
    PROCESSES,
    VERSIONS,
    clock_sql,
    create_tables,
    current_version,
    execute,
    insert,
    newest_version,
    read_processes,
    read_versions,
)

logger = logging.getLogger("sharded_orm.topology")
T = TypeVar("T")

#: The minimum number of versions to keep. A process that publishes reads the current row, and then
#: inserts a row with the next id. If others have published meanwhile, the row with this id must
#: still exist, so that the insert fails and does not undo their publications.
_KEPT_AT_LEAST = 20
# Every process writes this many signs of life (the current time in its row) in TIMEOUT seconds. A
# process without a sign of life for TIMEOUT seconds counts as ended.
_SIGNS = 3
# The seconds for which the watching thread waits after an unexpected error, that is, one that is
# not a database error.
_RECOVER_AFTER = 5.0
# The seconds between two checks whether Django has loaded the applications. The watching thread
# makes these checks.
_UNTIL_READY = 0.02
# The maximum number of seconds for which stop() waits for the end of the watching thread. After
# that, stop() returns even if the thread still runs.
_END_WITHIN = 3.0
# For each alias, the entry of DATABASES when the first source for the alias was created. A test run
# replaces the alias's database by a test database. But the topology must stay in the first
# database, also in processes that the test run starts.
_first_entries: dict[str, dict[str, Any]] = {}


class DatabaseSource(TopologySource):
    """A topology source that stores the document in a table; the module's docstring shows the tables.

    Every ``INTERVAL`` seconds (default 1), a background thread queries which row is the newest, and
    reads the document if it is new. Three times in ``TIMEOUT`` seconds (default 9), the thread also
    writes a sign of life, that is, the current time in the row of its process. A process without a
    sign of life for ``TIMEOUT`` seconds counts as ended. Code that uses the topology never waits
    for the database, because the thread does this work.

    Cost, for each process: one query per ``INTERVAL``, one write per sign of life. The thread keeps
    its connection for as long as ``CONN_MAX_AGE`` of the alias says.
    """

    writable: ClassVar[bool] = True
    option_names = frozenset({"ALIAS", "INTERVAL", "TIMEOUT", "HISTORY"})

    def __init__(self, options: Mapping[str, Any], setting: Mapping[str, Any]) -> None:
        super().__init__(options, setting)
        problems: list[str] = []
        self._alias = options.get("ALIAS", "default")
        self._interval = positive("INTERVAL", options.get("INTERVAL", 1.0), problems)
        self._timeout = positive("TIMEOUT", options.get("TIMEOUT", 9.0), problems)
        self._kept = options.get("HISTORY", 100)
        if type(self._kept) is not int or self._kept < _KEPT_AT_LEAST:
            problems.append(
                f"TOPOLOGY: HISTORY must be a whole number from {_KEPT_AT_LEAST} on, not {self._kept!r}"
            )
        if self._interval > self._timeout / _SIGNS:
            problems.append(
                f"TOPOLOGY: TIMEOUT must be at least {_SIGNS} times INTERVAL, not {self._timeout!r}"
                f" with {self._interval!r}"
            )
        # Call dict.items(). The method settings.DATABASES.items() would add the aliases of groups.
        # For this, it would need the topology, which is read from this source.
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
        self._database = _own_settings(
            _first_entries.setdefault(self._alias, dict(databases[self._alias]))
        )
        self._process = identity()
        self._name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._thread: threading.Thread | None = None
        # The connection object of the watching thread. After a fork, the child has a copy of this
        # object, but no copy of the thread. In the child, this attribute only prevents that the
        # copy is deleted as garbage, because that would disturb the parent's connection.
        self._connection: BaseDatabaseWrapper | None = None
        self._ended = threading.Event()
        self._wake = threading.Event()
        self._lost = False
        #: The id and the publication time of the document that was last passed to on_change(); None
        #: before the first call.
        self._reported: tuple[int, str] | None = None
        self._version = 0
        self._since = datetime.now(UTC)
        #: A pair. The first item is the topology version that this process has last written into
        #: its row of the table of processes; None if the write failed. The second item is the time,
        #: by time.monotonic(), at which the next sign of life is due.
        self._announced: tuple[int | None, float] = (None, 0.0)

    def describe(self) -> str:
        return f"the table {VERSIONS!r} of the database {self._alias!r}"

    # ##### Reading and writing, in the thread of the caller #####

    def load(self) -> Document | None:
        row = self._ask(current_version)
        return None if row is None else Document.from_json(row[2])

    def publish(self, document: Document, *, expected: int, comment: str = "") -> None:
        self._ask(lambda connection: self._publish(connection, document, expected, comment))
        self._wake.set()

    def history(self, limit: int) -> list[Revision]:
        columns = "version, published_at, note"
        rows = self._ask(
            lambda connection: read_versions(
                connection, f"SELECT {columns} FROM {VERSIONS} ORDER BY id DESC LIMIT %s", [limit]
            )
        )
        revisions = []
        for version, published_at, note in rows:
            by, comment = json.loads(note)
            revisions.append(Revision(version, parsed_time(published_at), by, comment))
        return revisions

    def revision(self, version: int) -> Document:
        sql = f"SELECT document FROM {VERSIONS} WHERE version = %s ORDER BY id DESC LIMIT 1"
        rows = self._ask(lambda connection: read_versions(connection, sql, [version]))
        if not rows:
            raise LookupError(f"{self.describe()} keeps no version {version!r}.")
        return Document.from_json(rows[0][0])

    def processes(self) -> list[Process]:
        return [
            Process(host, pid, version, parsed_time(since), name == self._name)
            for name, host, pid, version, since, silence in self._ask(read_processes)
            if silence < timedelta(seconds=self._timeout)
        ]

    def _publish(
        self, connection: BaseDatabaseWrapper, document: Document, expected: int, comment: str
    ) -> None:
        create_tables(connection)
        current = current_version(connection)
        version = 0 if current is None else version_of(current[2])
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
            "note": json.dumps([author(), comment]),
            "document": json.dumps(document.content(), indent=1),
        }
        try:
            # Another process may publish at the same time, and insert a row with this primary key
            # first. Then this insert raises an IntegrityError.
            insert(connection, VERSIONS, values)
        except IntegrityError as exc:
            raise TopologyConflict(
                f"{self.describe()} was changed by somebody else at this moment; nothing was"
                " published."
            ) from exc
        try:
            execute(connection, f"DELETE FROM {VERSIONS} WHERE id <= %s", [new - self._kept])
        except Error as exc:  # Ignore the error, because the document is published already.
            logger.info("Old versions in %s cannot be deleted: %s", self.describe(), exc)

    def _ask(self, work: Callable[[BaseDatabaseWrapper], T]) -> T:
        """Call ``work`` with a new connection, and return its result.

        Because the connection is new, ``work`` is not part of a transaction of the caller: it reads
        the latest rows, and the caller cannot roll back what it writes. Django refuses queries in a
        thread with a running event loop. In that case, another thread calls ``work``, and the
        caller waits for it.

        :raises TopologyUnavailable: the database cannot be used.
        """

        def call() -> T:
            connection = self._new_connection()
            try:
                return work(connection)
            finally:
                connection.close()

        try:
            with _without_warning():
                if not _runs_event_loop():
                    return call()
                with ThreadPoolExecutor(1) as executor:
                    return executor.submit(call).result()
        except TopologyError:
            raise
        # Catch every exception, because the driver raises various exceptions for wrong OPTIONS.
        except Exception as exc:
            raise TopologyUnavailable(
                f"{self.describe()} cannot be used: {type(exc).__name__}: {exc}".rstrip(".") + "."
            ) from exc

    def _new_connection(self) -> BaseDatabaseWrapper:
        backend = load_backend(self._database["ENGINE"])
        # Do not use the connection of the alias, because Django's test cases forbid connections to
        # the aliases in DATABASES.
        connection: BaseDatabaseWrapper = backend.DatabaseWrapper(
            self._database, f"topology in {self._alias}"
        )
        return connection

    # ##### Watching, in a separate thread #####

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
            return  # Do nothing in a forked child, which must not write to its parent's socket.
        self._ended.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            # Wait only for a limited time, because the thread may wait for an answer that never
            # comes.
            self._thread.join(_END_WITHIN)

    def _follow(self, on_change: OnChange) -> None:
        while not apps.ready:  # See _without_warning().
            if self._ended.wait(_UNTIL_READY):
                return
        while not self._ended.is_set():
            self._wake.clear()
            pause = self._interval
            try:
                if self._connection is None:
                    # Open the connection in this thread, because a connection belongs to the thread
                    # that opens it.
                    self._connection = self._new_connection()
                self._step(self._connection, on_change)
            except Exception as exc:
                # Catch every exception, so that this thread does not end. No other thread watches
                # the topology document.
                if not isinstance(exc, Error):
                    pause = _RECOVER_AFTER
                self._note_loss(exc)
                self._drop_connection()
            self._wake.wait(pause)
        if self._connection is not None:
            with suppress(Exception):
                # Delete this process's row, so that others see at once that it has ended. If that
                # fails, they see it when its last sign of life is old.
                execute(self._connection, f"DELETE FROM {PROCESSES} WHERE name = %s", [self._name])
            self._drop_connection()

    def _step(self, connection: BaseDatabaseWrapper, on_change: OnChange) -> None:
        """Call ``on_change`` if the current document is new. Then record this process's version."""
        newest = newest_version(connection)
        if newest is not None and newest != self._reported:
            row = current_version(connection)
            if row is not None:
                text = row[2]
                if (document := arrived(lambda: Document.from_json(text))) is not None:
                    on_change(document)
                self._reported = row[:2]
        if newest is not None:
            self._announce(connection)
        connection.close_if_unusable_or_obsolete()
        if self._lost:
            logger.info("%s answers again.", self.describe())
            self._lost = False

    def _note_loss(self, exc: Exception) -> None:
        if not self._lost:
            self._lost = True
            logger.warning(
                "%s is lost; this process goes on with version %d of the topology. (%s)",
                self.describe(), self._version, exc, exc_info=not isinstance(exc, Error),
            )  # fmt: skip

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):
                connection.close()

    def _announce(self, connection: BaseDatabaseWrapper) -> None:
        version, now = self._version, time.monotonic()
        announced, next_sign = self._announced
        if now < next_sign and announced in (version, None):
            return
        values = {
            "name": self._name,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": version,
            "since": self._since.isoformat(),
        }
        next_sign = now + self._timeout / _SIGNS
        try:
            sets = ", ".join(f"{column} = %s" for column in values)
            clock = clock_sql(connection)
            sql = f"UPDATE {PROCESSES} SET {sets}, seen = {clock} WHERE name = %s"
            if not execute(connection, sql, [*values.values(), self._name])[1]:
                self._remove_ended(connection)
                insert(connection, PROCESSES, values, seen=clock)
        except Error as exc:
            # This process could not store its version in the database. Its account may not be
            # allowed to write, or another process may have locked the row or the file. Continue,
            # because the process can still use the topology.
            if announced is not None or self._announced[1] == 0.0:
                logger.info("This process cannot tell %s its version: %s", self.describe(), exc)
            self._announced = None, next_sign
            connection.close()
        else:
            self._announced = version, next_sign

    def _remove_ended(self, connection: BaseDatabaseWrapper) -> None:
        """Delete the rows of processes whose last sign of life is older than ten times ``TIMEOUT``."""
        for name, *_, silence in read_processes(connection):
            if silence > timedelta(seconds=10 * self._timeout):
                execute(connection, f"DELETE FROM {PROCESSES} WHERE name = %s", [name])


def _own_settings(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``entry``, an entry of ``DATABASES``, with autocommit and without a
    connection pool.
    """
    database = {**complete(entry), "AUTOCOMMIT": True, "ATOMIC_REQUESTS": False}
    database["OPTIONS"].pop("pool", None)
    return database


def _runs_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextmanager
def _without_warning() -> Iterator[None]:
    """Silence the warning of Django's CursorWrapper about queries while applications are loaded.

    The topology is needed at that time, so the query is right. The filters of warnings apply to all
    threads. So the watching thread does not use this function, but waits until the applications are
    loaded.
    """
    if apps.ready:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the database during app initialization")
        yield
