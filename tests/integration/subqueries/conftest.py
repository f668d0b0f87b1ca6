"""The same rows on shards and in one plain database, and the answers of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from django.db import connections

from sharded_orm import runtime
from tests.integration.scatter.conftest import insert
from tests.queries.conftest import DATABASES, db_all, placed
from tests.twins.models import PlainTrunk, PlainTwig, Trunk, Twig

__all__ = ["DATABASES", "db_all", "placed"]

#: Two of them are on one shard.
OWNERS = (0, 1, 2, 8)


@dataclass(frozen=True)
class Models:
    """One of the two sets of models. ``everywhere`` allows a query on all shards."""

    trunk: Any
    twig: Any
    everywhere: Callable[[Any], Any]

    def of(self, name: str) -> Any:
        return self.trunk if name == "trunk" else self.twig


SHARDED = Models(Trunk, Twig, lambda queryset: queryset.scatter())
PLAIN = Models(PlainTrunk, PlainTwig, lambda queryset: queryset)

#: ``(id, owner, n)`` for trunks, ``(id, owner, ref, n, parent)`` for twigs.
Trunks = list[tuple[Any, ...]]
Twigs = list[tuple[Any, ...]]
TRUNK = ("id", "owner", "n")
TWIG = ("id", "owner", "ref", "n", "parent_id")


def alias_of(owner: int) -> str:
    shard = runtime.locate("events", owner)
    assert shard is not None
    return shard.alias


def aliases() -> list[str]:
    return sorted({alias_of(owner) for owner in OWNERS})


def store(trunks: Trunks, twigs: Twigs) -> None:
    """Replace all rows of both sets."""
    for alias, models in [
        *((a, (Twig, Trunk)) for a in aliases()),
        ("default", (PlainTwig, PlainTrunk)),
    ]:
        with connections[alias].cursor() as cursor:
            for model in models:
                cursor.execute(f"DELETE FROM {model._meta.db_table}")
    for names, rows, sharded, plain in (
        (TRUNK, trunks, Trunk, PlainTrunk),
        (TWIG, twigs, Twig, PlainTwig),
    ):
        if not rows:
            continue
        insert([plain(**dict(zip(names, row, strict=True))) for row in rows], "default")
        by_alias: dict[str, list[Any]] = {}
        for row in rows:
            by_alias.setdefault(alias_of(row[1]), []).append(row)
        for alias, own in by_alias.items():
            insert([sharded(**dict(zip(names, row, strict=True))) for row in own], alias)


def rows_of(models: Models) -> Any:
    """Return all rows; for rows on shards also whether each is on the shard of its key."""
    tables = []
    for model, names in ((models.trunk, TRUNK), (models.twig, TWIG)):
        if models is PLAIN:
            tables.append(sorted(model.objects.values_list(*names)))
            continue
        rows = []
        for alias in aliases():
            own = list(model.objects.using(alias).values_list(*names))
            assert all(alias_of(row[1]) == alias for row in own), own
            rows += own
        tables.append(sorted(rows))
    return tables


@pytest.fixture
def forest() -> None:
    """Trunks 1 to 4 of the owners 0, 1, 2 and 8; each has a twig that refers to the next trunk."""
    trunks = [(1, 0, 5), (2, 1, 6), (3, 2, None), (4, 8, 8)]
    twigs = [(11, 0, 2, 1, 1), (12, 1, 3, 2, 2), (13, 2, 4, 3, 3), (14, 8, 1, 4, 1)]
    store(trunks, twigs)
