"""The same rows in one database and over several shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from django.db import connections
from django.db.models import Model, QuerySet

from sharded_orm import runtime, scatter
from sharded_orm.models.sharding.rows_of_keys import RowsOfKeys
from sharded_orm.routing.placement_lease import KeyInFlight
from sharded_orm.scatter import Target, first_rows, plan
from tests.samples.models import Part, Sample

# Shards of both nodes. The last one holds all rows, and is never queried with the others.
SHARDS = (0, 1, 2, 8, 9)
WHOLE = "photos_00015"
#: Owners whose rows are moving: they are on the shard of the owner, and hidden on this one of SHARDS.
COPIES = {0: 3, 1: 0, 4: 0}
_copies: dict[int, int] = {}


@dataclass
class Outcome:
    """The result of one database, and the result of the shards together."""

    one: Any
    many: Any


def targets(queryset: QuerySet[Any]) -> list[Target]:
    group = runtime.group("photos")
    return [
        Target(group.shard(number), queryset.query, _hidden(position))
        for position, number in enumerate(SHARDS)
    ]


def _hidden(position: int) -> RowsOfKeys | None:
    owners = [str(owner) for owner, copy in _copies.items() if copy == position]
    moves = [KeyInFlight("photos", text, text, 1, 0, 0, "switching") for text in owners]
    return RowsOfKeys("photos", moves) if moves else None


def fetch(queryset: QuerySet[Any], **options: Any) -> list[Any]:
    return list(scatter.fetch(queryset, targets(queryset), **options))


def one_database(model: type[Model]) -> QuerySet[Any]:
    return model._default_manager.using(WHOLE)


def store(samples: Sequence[Sample], parts: Sequence[Part] = ()) -> None:
    """Replace all rows: each on the shard of its owner, and all in one database."""
    aliases = [f"photos_{number:05d}" for number in SHARDS]
    for alias in [*aliases, WHOLE]:
        for model in (Part, Sample):
            with connections[alias].cursor() as cursor:
                cursor.execute(f"DELETE FROM {model._meta.db_table}")
    for rows in (samples, parts):
        distribute(rows)


def distribute(rows: Sequence[Any]) -> None:
    """Insert rows: each on the shard of its owner, and all in one database."""
    aliases = [f"photos_{number:05d}" for number in SHARDS]
    by_alias: dict[str, list[Any]] = {WHOLE: list(rows)}
    for row in rows:
        by_alias.setdefault(aliases[row.owner % len(aliases)], []).append(row)
        if row.owner in _copies:
            by_alias.setdefault(aliases[_copies[row.owner]], []).append(row)
    for alias, own in by_alias.items():
        if own:
            insert(own, alias)


def insert(rows: Sequence[Model], alias: str) -> None:
    """Insert rows into one shard, whatever their keys say."""
    connection = connections[alias]
    fields = rows[0]._meta.concrete_fields
    quote = connection.ops.quote_name
    names = ", ".join(quote(field.column) for field in fields)
    marks = ", ".join(["%s"] * len(fields))
    table = quote(rows[0]._meta.db_table)
    values = [
        [field.get_db_prep_save(getattr(row, field.attname), connection) for field in fields]
        for row in rows
    ]
    with connection.cursor() as cursor:
        cursor.executemany(f"INSERT INTO {table} ({names}) VALUES ({marks})", values)


@pytest.fixture(params=["one batch", "many batches", "copies"])
def batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch sizes for merging in the server and in Python; two phases whenever possible; some rows on
    two shards, because their keys are moving.
    """
    monkeypatch.setattr(first_rows, "MIN_CANDIDATES", 0)
    monkeypatch.setattr(plan, "BATCH", 1 if request.param == "many batches" else 256)
    if request.param == "copies":
        for owner, copy in COPIES.items():
            monkeypatch.setitem(_copies, owner, copy)
