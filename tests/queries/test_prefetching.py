"""The state that prefetching leaves, and prefetches for rows that were created, not read."""

from __future__ import annotations

from typing import Any

import pytest
from django.db.models import Prefetch, prefetch_related_objects

from sharded_orm.exceptions import ShardKeyRequired
from tests.queries.conftest import DATABASES, ONE, TWO
from tests.queries.twins import all_rows
from tests.relatives.sharded import models as sharded_models

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

RELATIONS = [
    ("Shelf", 11, "items", "Item"),
    ("Item", 101, "labels", "Label"),
    ("Label", 21, "items", "Item"),
    ("Item", 101, "shelf", "Shelf"),
    ("Item", 101, "cover", "Cover"),
    ("Item", 101, "children", "Item"),
]


@pytest.mark.parametrize(("model", "pk", "accessor", "target"), RELATIONS)
def test_a_queryset_that_was_prefetched_with_is_about_the_same_rows_as_before(
    worlds: tuple[Any, Any], model: str, pk: int, accessor: str, target: str
) -> None:
    found = []
    for world in worlds:
        rows = all_rows(getattr(world.models, target), world)
        prefetch_related_objects([world.of(model, pk)], Prefetch(accessor, rows))
        found.append((sorted(row.pk for row in rows), rows.update(stars=7)))
    assert found[0] == found[1]


def test_a_queryset_that_was_prefetched_with_does_not_name_a_shard_afterwards(
    worlds: tuple[Any, Any],
) -> None:
    rows = sharded_models.Item.objects.all()
    prefetch_related_objects([worlds[1].of("Shelf", 11)], Prefetch("items", rows))
    with pytest.raises(ShardKeyRequired):
        list(rows)


@pytest.mark.parametrize("accessor", ["shelf", "labels", "cover", "children"])
def test_prefetches_for_a_row_that_was_made_by_hand(worlds: tuple[Any, Any], accessor: str) -> None:
    found = []
    for world in worlds:
        made = world.models.Item(id=101, owner_id=ONE, shelf_id=11)
        rows = [made, world.of("Item", 102), world.models.Item(id=106, owner_id=TWO, shelf_id=12)]
        prefetch_related_objects(rows, accessor)
        related = [getattr(row, accessor, None) for row in rows]
        found.append(
            [
                sorted(each.pk for each in one.all()) if hasattr(one, "all") else one and one.pk
                for one in related
            ]
        )
    assert found[0] == found[1]


def test_values_are_not_prefetched_for(worlds: Any) -> None:
    # Django ignores the prefetch if the rows are no instances.
    for world in worlds:
        items = world.models.Item.objects.filter(owner_id=ONE).prefetch_related("labels")
        assert sorted(items.values_list("pk", flat=True)) == [101, 104, 105, 107]
        both = items.values("pk").union(items.values("pk"))
        assert sorted(row["pk"] for row in both) == [101, 104, 105, 107]
