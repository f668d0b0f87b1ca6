"""The rows of a shard's ``django_migrations``: applied migrations and markers.

A *marker* is a row that an operation's transaction adds. If the process is killed, the next process
looks for the marker: if it exists, the transaction was committed. Django ignores markers, as it
ignores any row about a migration that does not exist. When a migration is recorded as applied, all
markers are deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from django.db import connections, transaction
from django.db.migrations.recorder import MigrationRecorder
from django.utils import timezone

from sharded_orm.backends.snapshot import MARKER_APP, MARKER_PREFIX
from sharded_orm.operations.migrate.plan import Key

#: Name of the table ``django_migrations``, the same on all shards.
TABLE = MigrationRecorder.Migration._meta.db_table


class Records:
    """Reads and writes the rows of one shard's ``django_migrations``, which must exist.

    To be used by one thread.

    :param has_markers: whether an earlier process may have left markers on the shard. A marker is a
        row that proves the commit of an operation.
    """

    def __init__(self, alias: str, *, has_markers: bool = False) -> None:
        self._alias = alias
        self._has_markers = has_markers

    @property
    def _rows(self) -> Any:
        return MigrationRecorder.Migration.objects.using(self._alias)

    @property
    def _markers(self) -> Any:
        return self._rows.filter(app=MARKER_APP, name__startswith=MARKER_PREFIX)

    def applied(self) -> frozenset[Key]:
        """Return the migrations that the shard has applied. One query."""
        # Use plain SQL, because it is faster than the ORM.
        connection = connections[self._alias]
        app, name, table = map(connection.ops.quote_name, ("app", "name", TABLE))
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {app}, {name} FROM {table}")
            rows = cursor.fetchall()
        return frozenset(
            (app, name)
            for app, name in rows
            if not (app == MARKER_APP and name.startswith(MARKER_PREFIX))
        )

    def mark(self, name: str) -> None:
        """Add a marker to the open transaction: a row that shows later whether it was committed.

        :param name: the name of the marker; see :func:`marker_name`.
        """
        self._has_markers = True
        self._insert([(MARKER_APP, name)])

    def is_marked(self, name: str) -> bool:
        return bool(self._rows.filter(app=MARKER_APP, name=name).exists())

    def record(self, keys: Iterable[Key], *, backwards: bool) -> None:
        """Record migrations as applied; if ``backwards``, as not applied any more.

        In the same transaction, delete all markers. A marker proves that one operation was
        committed, and is not needed any more once the whole migration is recorded.
        """
        if not backwards and not self._has_markers:
            self._insert(list(keys))  # A single statement needs no explicit transaction.
            return
        with transaction.atomic(using=self._alias):
            if backwards:
                for app, name in keys:
                    self._rows.filter(app=app, name=name).delete()
            else:
                self._insert(list(keys))
            if self._has_markers:
                self._markers.delete()

    def _insert(self, keys: Sequence[Key]) -> None:
        # Use plain SQL. A new shard may need this statement once for each migration, and the ORM
        # takes longer to compile it than the server takes to run it.
        connection = connections[self._alias]
        quote = connection.ops.quote_name
        columns = ", ".join(quote(column) for column in ("app", "name", "applied"))
        rows = ", ".join(["(%s, %s, %s)"] * len(keys))
        applied = connection.ops.adapt_datetimefield_value(timezone.now())
        with connection.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO {quote(TABLE)} ({columns}) VALUES {rows}",
                [value for key in keys for value in (*key, applied)],
            )


def marker_name(run: int, number: int) -> str:
    """Return the name of a marker: the row that proves that a transaction was committed.

    :param run: the id of the journal run.
    :param number: the number of the marker, which is unique for the shard within the run.
    """
    return f"{MARKER_PREFIX}{run} step {number}"
