"""The same rows in one database and over several shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from django.db import connections
from django.db.models import Model, QuerySet

from sharded_orm import runtime, scatter
from sharded_orm.scatter import Target, plan, two_phase
from tests.samples.models import Part, Sample

# Shards of both nodes. The last one holds all rows, and is never queried with the others.
SHARDS = (0, 1, 2, 8, 9)
WHOLE = "photos_00015"


@dataclass
class Outcome:
    """The result of one database, and the result of the shards together."""

    one: Any
    many: Any


def targets(queryset: QuerySet[Any]) -> list[Target]:
    group = runtime.group("photos")
    return [Target(group.shard(number), queryset.query) for number in SHARDS]


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
        by_alias: dict[str, list[Any]] = {WHOLE: list(rows)}
        for row in rows:
            by_alias.setdefault(aliases[row.owner % len(aliases)], []).append(row)
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


@pytest.fixture(params=["one batch", "many batches"])
def batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch sizes for merging in the server and in Python; two phases whenever possible."""
    monkeypatch.setattr(two_phase, "MIN_CANDIDATES", 0)
    monkeypatch.setattr(plan, "BATCH", 256 if request.param == "one batch" else 1)
