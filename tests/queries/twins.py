"""The same rows in one plain database and on shards, and the same calls on both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

from asgiref.sync import async_to_sync
from django.contrib.contenttypes.models import ContentType
from django.db import DatabaseError, connections, models, transaction
from django.db.models.query import BaseIterable, QuerySet

from sharded_orm.exceptions import ShardedOrmError
from tests.queries.conftest import NEAR, ONE, SHARD, START, TWO
from tests.relatives.plain import models as plain_models
from tests.relatives.sharded import models as sharded_models

#: Words that name a remedy; an error message must contain one of them.
REMEDIES = (
    ".scatter()",
    "filter by it",
    "Use add()",
    "same shard key",
    "evaluate",
    "query them one after the other",
    "Remedy:",
    "Create the row",
    "create the row",
    "name the shard",
    "Set it before",
    "Delete them first",
)
ALIASES = tuple(sorted(set(SHARD.values())))
#: The models whose rows are in the global database in both sets.
GLOBAL = frozenset({"Agent", "City", "Memo"})
GROUP = "photos"


#: By the models of a set and the ids of their content types: the databases of the rows, and the inserts.
_stored: dict[Any, tuple[dict[tuple[str, Any], str], list[tuple[str, str, list[Any]]]]] = {}


class World:
    """One set of the models, with rows.

    :param aliases: databases that hold the rows.
    """

    def __init__(self, models: ModuleType, aliases: tuple[str, ...] | None) -> None:
        self.models: Any = models
        self.aliases = aliases
        self._homes: dict[tuple[str, Any], str] = {}

    def of(self, name: str, pk: Any) -> Any:
        """Read a row from the database, so that no call shares an object with another."""
        model = getattr(self.models, name)
        return model._base_manager.using(self._homes[name, pk]).get(pk=pk)

    def _create(self, model: str, **values: Any) -> Any:
        row = getattr(self.models, model).objects.create(**values)
        self._homes[model, row.pk] = row._state.db
        return row

    def tables(self) -> Iterator[Any]:
        names = ("Agent", "City", "Shelf", "Label", "Item", "Passport", "Badge", "Cover")
        names += ("Note", "Memo")
        yield from (getattr(self.models, name) for name in names)
        yield self.models.Item.labels.through
        yield self.models.Item.friends.through

    def rows(self) -> dict[str, list[Any]]:
        """Return all rows of all tables, without the ids of automatic tables."""
        rows_by_table: dict[str, list[Any]] = {}
        for model in self.tables():
            columns = [f.column for f in model._meta.concrete_fields]
            if model._meta.auto_created:
                columns.remove("id")
            # Plain SQL, as the reading of the ORM is under test.
            sql = f"SELECT {', '.join(columns)} FROM {model._meta.db_table}"
            is_global = self.aliases is None or model.__name__ in GLOBAL
            for alias in ("default",) if is_global else self.aliases or ():
                with connections[alias].cursor() as cursor:
                    cursor.execute(sql)
                    rows = [_with_content_type(columns, row) for row in cursor.fetchall()]
                    rows_by_table.setdefault(model.__name__, []).extend(rows)
        return {name: sorted(rows, key=repr) for name, rows in rows_by_table.items()}

    def fill(self) -> None:
        """Create the rows. Later calls in this process insert what the first one has stored."""
        content_types = [
            ContentType.objects.get_for_model(getattr(self.models, name)).pk
            for name in ("Item", "Agent", "Passport")
        ]
        key = self.models, *content_types
        if key in _stored:
            self._homes, inserts = dict(_stored[key][0]), _stored[key][1]
            for alias, sql, rows in inserts:
                with connections[alias].cursor() as cursor:
                    cursor.executemany(sql, rows)
        else:
            self._create_all()
            _stored[key] = dict(self._homes), list(self._inserts())

    def _inserts(self) -> Iterator[tuple[str, str, list[Any]]]:
        """Yield the alias, a statement and its rows, for each table of each database with rows."""
        for model in self.tables():
            columns = ", ".join(field.column for field in model._meta.concrete_fields)
            table = model._meta.db_table
            order = model._meta.pk.column
            is_global = self.aliases is None or model.__name__ in GLOBAL
            for alias in ("default",) if is_global else self.aliases or ():
                with connections[alias].cursor() as cursor:
                    cursor.execute(f"SELECT {columns} FROM {table} ORDER BY {order}")
                    rows = list(cursor.fetchall())
                values = ", ".join(["%s"] * len(model._meta.concrete_fields))
                if rows:
                    yield alias, f"INSERT INTO {table} ({columns}) VALUES ({values})", rows

    def _create_all(self) -> None:
        agents = {pk: self._create("Agent", id=pk, name=f"agent {pk}") for pk in (ONE, TWO, NEAR)}
        cities = {pk: self._create("City", id=pk, name=f"city {pk}") for pk in (5, 6)}
        shelves = {
            pk: self._create("Shelf", id=pk, name=f"shelf {pk}", owner=agents[owner])
            for pk, owner in ((11, ONE), (12, TWO), (13, NEAR), (14, ONE))
        }
        labels = {
            pk: self._create(
                "Label", id=pk, name=f"label {pk}", owner=agents[owner], stars=pk, posted_at=START
            )
            for pk, owner in ((21, ONE), (22, TWO), (23, NEAR), (24, ONE), (25, ONE))
        }
        items: dict[int, Any] = {}
        # Columns: pk, owner, buyer, seller, shelf, city, parent.
        for pk, owner, buyer, seller, shelf, city, parent in (
            (101, ONE, None, ONE, 11, 5, None),
            (102, TWO, ONE, ONE, 12, 5, None),
            (103, NEAR, ONE, TWO, 13, 5, None),
            (104, ONE, ONE, NEAR, 11, None, 101),
            (105, ONE, TWO, TWO, None, 6, 101),
            (106, TWO, None, ONE, 12, None, 102),
            (107, ONE, None, TWO, None, None, None),
        ):
            items[pk] = self._create(
                "Item",
                id=pk,
                name=f"item {pk}",
                stars=pk % 4,
                posted_at=START + timedelta(days=pk % 3),
                owner=agents[owner],
                buyer=agents.get(buyer),
                seller=agents[seller],
                shelf=shelves.get(shelf),
                city=cities.get(city),
                parent=items.get(parent),
            )
        for pk, chosen in ((101, (21, 24)), (104, (21,)), (102, (22,)), (103, (23,))):
            items[pk].labels.add(*(labels[label] for label in chosen))
        items[101].friends.add(items[104])
        for pk in (ONE, TWO):
            self._create("Passport", id=30 + pk, name=f"passport {pk}", owner=agents[pk])
        self._create("Badge", id=41, name="badge", owner=agents[TWO], holder=agents[ONE])
        self._create("Cover", id=51, name="cover", owner=agents[ONE], item=items[101])
        self._create("Cover", id=52, name="cover", owner=agents[TWO], item=items[102])
        passport = self.of("Passport", 30 + TWO)
        # Columns: pk, owner, the row that it is about.
        for model, pk, owner, about in (
            ("Note", 61, ONE, items[101]),
            ("Note", 62, ONE, items[101]),
            ("Note", 63, TWO, items[102]),
            ("Note", 64, NEAR, items[103]),
            ("Note", 65, ONE, agents[TWO]),
            ("Note", 66, TWO, agents[TWO]),
            ("Note", 67, ONE, None),
            ("Memo", 71, ONE, passport),
            ("Memo", 72, ONE, passport),
            ("Memo", 73, TWO, None),
            ("Memo", 77, ONE, None),
        ):
            self._create(
                model,
                id=pk,
                name=f"{model} {pk}",
                stars=pk % 3,
                posted_at=START + timedelta(days=pk % 4),
                owner=agents[owner],
                content_object=about,
            )


def _with_content_type(columns: Sequence[str], row: Sequence[Any]) -> tuple[Any, ...]:
    """Name the content type in ``row``, which has another id in each set of models."""
    return tuple(
        _content_type(value) if column == "content_type_id" else value
        for column, value in zip(columns, row, strict=True)
    )


def _content_type(value: int | None) -> str | None:
    return None if value is None else ContentType.objects.get_for_id(value).model


def both() -> tuple[World, World]:
    return World(plain_models, None), World(sharded_models, ALIASES)


@dataclass(frozen=True)
class Outcome:
    """The result or the error of a call, and the rows after it."""

    value: Any
    error: BaseException | None
    rows: dict[str, list[Any]]

    @property
    def is_refusal(self) -> bool:
        return isinstance(self.error, ShardedOrmError)

    def comparable(self) -> tuple[Any, str | None]:
        """The part that must be equal on both sides; for an error its class."""
        return self.value, type(self.error).__name__ if self.error is not None else None


@contextmanager
def rolled_back() -> Iterator[None]:
    """Undo all writes of the block."""
    with transaction.atomic(), transaction.atomic(using=GROUP):
        yield
        for alias in ("default", GROUP):
            transaction.set_rollback(True, using=alias)


def outcome(world: World, call: Callable[[World], Any], *, writes: bool) -> Outcome:
    """Run ``call`` and undo its writes.

    :param writes: whether it may write; only then are the rows compared.
    """
    value: Any = None
    error: BaseException | None = None
    # PostgreSQL runs nothing in a transaction after an error.
    errors_end = connections["default"].vendor == "postgresql"
    with rolled_back() if writes or errors_end else nullcontext():
        try:
            value = comparable_value(call(world))
        except Exception as exc:
            error = exc
        if (
            errors_end
            and isinstance(error, DatabaseError)
            and not isinstance(error, ShardedOrmError)
        ):
            return Outcome(value, error, {})
        for alias in ("default", GROUP):
            # The rows that were written before the error must stay visible.
            transaction.set_rollback(False, using=alias)
        return Outcome(value, error, world.rows() if writes else {})


def all_rows(model: Any, world: World) -> Any:
    """Return all rows of a model."""
    is_global = world.aliases is None or model.__name__ in GLOBAL
    return model.objects.all() if is_global else model.objects.scatter()


def comparable_value(value: Any) -> Any:
    """Convert a value so that it equals its twin's."""
    if isinstance(value, models.Model):
        columns = [f.attname for f in value._meta.concrete_fields]
        deferred = value.get_deferred_fields()
        present = [name for name in columns if name not in deferred]
        values = _with_content_type(present, [value.__dict__.get(name) for name in present])
        return type(value).__name__, list(zip(present, values, strict=True))
    if isinstance(value, QuerySet):
        rows = [comparable_value(row) for row in value]
        return rows if value.ordered else sorted(rows, key=repr)
    if isinstance(value, dict):
        # delete() may report a table from which nothing was deleted.
        pairs = [
            (comparable_value(key), comparable_value(item))
            for key, item in value.items()
            if item != 0
        ]
        return sorted(pairs, key=repr)
    if isinstance(value, set | frozenset):
        return sorted((comparable_value(item) for item in value), key=repr)
    if isinstance(value, tuple | list):
        return [comparable_value(item) for item in value]
    if isinstance(value, str):
        return value.replace("relatives_sharded", "relatives_plain")
    assert not isinstance(value, BaseIterable)
    return value


class Asynchronous:
    """A manager or queryset whose method ``name`` is replaced by its asynchronous counterpart."""

    def __init__(self, rows: Any, name: str) -> None:
        self._rows, self._name = rows, name

    def __getattr__(self, name: str) -> Any:
        if name != self._name:
            return getattr(self._rows, name)
        method = getattr(self._rows, f"a{name}")

        # The methods of a manager are plain functions that return an awaitable.
        async def result(*args: Any, **kwargs: Any) -> Any:
            if name == "iterator":
                return [row async for row in method(*args, **kwargs)]
            return await method(*args, **kwargs)

        return async_to_sync(result)
