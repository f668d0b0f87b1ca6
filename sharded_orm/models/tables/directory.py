"""The directory: the table with the shard of each key, and the class that accesses it (Yupoo, Y2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from django.db import DEFAULT_DB_ALIAS, Error, models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import OuterRef, Q, Subquery
from django.db.models.constants import OnConflict
from django.db.models.sql import InsertQuery

from sharded_orm.autonomous_connections import AutonomousConnections
from sharded_orm.backends.missing_parts import is_missing_table
from sharded_orm.models.fields.text import ExactCharField
from sharded_orm.models.tables.key_move import KeyMove
from sharded_orm.routing.directory import StoredPlacement
from sharded_orm.routing.placement_lease import KeyInFlight, MoveList

BATCH = 500


class Placement(models.Model):
    """A shard key of one group, and the number of the shard that has the rows of the key."""

    group: models.CharField[str, str] = ExactCharField(max_length=64)
    key: models.CharField[str, str] = ExactCharField(max_length=100)
    shard: models.PositiveIntegerField[int, int] = models.PositiveIntegerField()
    placed_at: models.DateTimeField[datetime, datetime] = models.DateTimeField(auto_now_add=True)

    class Meta:
        app_label = "sharded_orm"
        db_table = "sharded_orm_directory"
        constraints = [
            models.UniqueConstraint(fields=["group", "key"], name="sharded_orm_directory_key")
        ]
        indexes = [models.Index(fields=["group", "shard"], name="sharded_orm_directory_shard")]

    def __str__(self) -> str:
        return f"{self.key} of {self.group} on shard {self.shard}"


#: A subquery for the number of the last move that has switched the key to another shard. It is a
#: part of the query for the key's shard, so that the number and the shard are read at the same
#: moment.
_LAST_MOVE = Subquery(
    KeyMove.objects.filter(
        group=OuterRef("group"), key=OuterRef("key"), phase__in=("switched", "settled")
    )
    .order_by("-id")
    .values("id")[:1]
)
#: A query for the moves that have not ended. It also returns the latest move, even if this has
#: ended. By the number of the latest move, a process knows whether a move was announced since its
#: previous query.
_OPEN_MOVES = KeyMove.objects.filter(
    Q(in_flight=True) | Q(id=Subquery(KeyMove.objects.order_by("-id").values("id")[:1]))
)
_MOVE_COLUMNS = ("in_flight", "group", "key", "value", "id", "source", "target", "phase")


def missing_table_remedy(exc: BaseException, alias: str) -> str:
    """Return a sentence that says what to do if the directory lacks a table.

    :param exc: the error to look at. If it does not say that a table of the directory is missing,
        the result is "".
    :param alias: the alias of the directory's database.
    """
    tables = (Placement._meta.db_table, KeyMove._meta.db_table)
    if not is_missing_table(exc) or not any(table in str(exc) for table in tables):
        return ""
    database = "" if alias == DEFAULT_DB_ALIAS else f" --database {alias}"
    return f"The directory in {alias!r} lacks its tables: run 'manage.py migrate{database}'."


@contextmanager
def _remedy_in_errors(alias: str) -> Iterator[None]:
    """A context manager that adds the remedy to an error which says that a table is missing."""
    try:
        yield
    except Error as exc:
        if remedy := missing_table_remedy(exc, alias):
            exc.add_note(remedy)
        raise


class DatabaseDirectory:
    """Stores the shard of each key in the directory table on ``alias``. Thread-safe.

    Each statement is committed independently of the caller's transaction. So other processes see a
    placement at once, and a rollback does not undo it. Inside Django's ``TestCase``, the statements
    are part of the test's transaction, and the returned placements have ``committed = False``.
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._connections = AutonomousConnections()
        # The compiled statements that look up keys. Maps (class of the connection, number of
        # parameters to append) to the SQL and its first parameters. They are kept, because
        # compiling a statement takes longer than executing it.
        self._lookups: dict[tuple[type, int], tuple[str, tuple[Any, ...]]] = {}
        # The compiled statements that read the unfinished moves of keys. Maps the class of the
        # connection to the SQL and its parameters. They are kept, because a writer waiting for the
        # end of a move sends the statement every few milliseconds.
        self._open_moves: dict[type, tuple[str, tuple[Any, ...]]] = {}

    def find(self, group: str, keys: Iterable[str]) -> dict[str, StoredPlacement]:
        connection, committed = self._connections.get(self._alias)
        return self._find(connection, committed, group, list(keys))

    def place(self, group: str, placements: Mapping[str, int]) -> dict[str, StoredPlacement]:
        connection, committed = self._connections.get(self._alias)
        fields = [f for f in Placement._meta.concrete_fields if not f.primary_key]
        rows: list[models.Model] = [
            Placement(group=group, key=k, shard=n) for k, n in sorted(placements.items())
        ]
        for start in range(0, len(rows), BATCH):
            # If several processes insert the same key at once, the first insert wins and the others
            # do nothing. All of these processes then read the stored shard of the key with _find().
            query = InsertQuery(Placement, on_conflict=OnConflict.IGNORE)
            query.insert_values(fields, rows[start : start + BATCH])
            with _remedy_in_errors(self._alias):
                query.get_compiler(connection=connection).execute_sql()
        return self._find(connection, committed, group, list(placements))

    def moves(self, since: int | None = None) -> MoveList | None:
        connection, committed = self._connections.get(self._alias)
        if not committed:
            return None
        statement = self._open_moves.get(type(connection)) if since is None else None
        if statement is None:
            moves = _OPEN_MOVES
            if since is not None:
                moves = KeyMove.objects.filter(Q(in_flight=True) | Q(id__gt=since))
            query = moves.using(self._alias).values_list(*_MOVE_COLUMNS).query
            statement = query.get_compiler(connection=connection).as_sql()
            if since is None:
                self._open_moves[type(connection)] = statement
        sql, params = statement
        # Use the cursor of the driver, because Django's cursor logs each query. Every process sends
        # this query every few seconds, and tests that count logged queries would count it, too.
        cursor: Any
        with (
            _remedy_in_errors(self._alias),
            connection.cursor() as cursor,
            connection.wrap_database_errors,
        ):
            cursor.cursor.execute(sql, params)
            rows = cursor.cursor.fetchall()
        in_flight = tuple(KeyInFlight(*move) for is_open, *move in rows if is_open)
        ended = tuple(KeyInFlight(*move) for is_open, *move in rows if not is_open)
        last = max((move.number for move in (*in_flight, *ended)), default=0)
        return MoveList(in_flight, max(last, since or 0), ended)

    def _find(
        self, connection: BaseDatabaseWrapper, committed: bool, group: str, keys: list[str]
    ) -> dict[str, StoredPlacement]:
        placements = {}
        cursor: Any
        for start in range(0, len(keys), BATCH):
            values = (group, *keys[start : start + BATCH])
            kind = type(connection), len(values)
            if (lookup := self._lookups.get(kind)) is None:
                lookup = self._lookups[kind] = self._compile(connection, len(values) - 1)
            sql, params = lookup
            with _remedy_in_errors(self._alias), connection.cursor() as cursor:
                cursor.execute(sql, params + values)
                for key, number, version in cursor.fetchall():
                    placements[key] = StoredPlacement(number, committed, version or 0)
        return placements

    def _compile(self, connection: BaseDatabaseWrapper, count: int) -> tuple[str, tuple[Any, ...]]:
        """Return the statement that looks up ``count`` keys, and its first parameters.

        The caller appends the group and the keys to these parameters.
        """
        values = [str(number) for number in range(count)]
        query = (
            Placement.objects.using(self._alias)
            .filter(group="group", key__in=values)
            .values_list("key", "shard", _LAST_MOVE)
            .query
        )
        sql, params = query.get_compiler(connection=connection).as_sql()
        first, last = tuple(params[: -1 - count]), list(params[-1 - count :])
        assert last == ["group", *values], "Django has changed the order of the parameters"
        return sql, first
