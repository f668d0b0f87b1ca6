"""The rows of a shard's ``django_migrations``: applied migrations and markers.

A *marker* is a row that is written in the transaction of an operation. After a kill, the marker
shows that the transaction was committed. Django ignores markers, like any other row about a
migration that does not exist. All markers are deleted when a migration is recorded.
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

    :param has_markers: whether an earlier process may have left markers on the shard: rows that
        prove the commit of an operation.
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
        """Write a marker: a row that shows later whether the open transaction was committed.

        :param name: the name of the marker; see :func:`marker_name`.
        """
        self._has_markers = True
        self._insert([(MARKER_APP, name)])

    def is_marked(self, name: str) -> bool:
        return bool(self._rows.filter(app=MARKER_APP, name=name).exists())

    def record(self, keys: Iterable[Key], *, backwards: bool) -> None:
        """Record that migrations are applied; if ``backwards``, that they are not applied any more.

        In the same transaction, delete all markers, which prove that single operations were
        committed: the record of the whole migration replaces them.
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
        # Use plain SQL, because the ORM takes longer to compile this statement than the server
        # takes to run it. A new shard may need the statement once for each migration.
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
    """Return the name of a marker, which is a row that proves a commit.

    :param run: the id of the journal run.
    :param number: the number of the marker. Within one run, no two markers on a shard have the same
        number.
    """
    return f"{MARKER_PREFIX}{run} step {number}"
