"""``order_with_respect_to``: as on one database, since all rows of a related row are on its shard."""

from __future__ import annotations

from typing import Any

import pytest

from sharded_orm import bound
from sharded_orm.exceptions import ShardKeyRequired
from tests.queries.conftest import DATABASES
from tests.twins.models import Folder, Leaf, PlainFolder, PlainSheet, Root, Sheet, Trunk

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

#: Keys of the group "events": the first two are on one shard.
ONE, NEAR, TWO = 1, 9, 2
#: Id of a folder -> its owner and the ids of its sheets.
FOLDERS = {1: (ONE, (11, 12, 13)), 2: (ONE, (14,)), 3: (NEAR, (15, 16)), 4: (TWO, (17, 18))}


@pytest.fixture(params=[(PlainFolder, PlainSheet), (Folder, Sheet)], ids=["plain", "sharded"])
def folders(request: pytest.FixtureRequest, db_all: None) -> dict[int, Any]:
    folder_class, sheet_class = request.param
    folders = {
        pk: folder_class.objects.create(pk=pk, owner=owner) for pk, (owner, _) in FOLDERS.items()
    }
    for pk, (owner, ids) in FOLDERS.items():
        for sheet in ids:
            sheet_class.objects.create(pk=sheet, owner=owner, folder=folders[pk])
    return folders


def orders(folders: dict[int, Any]) -> dict[int, list[int]]:
    return {pk: list(order_of(folder)) for pk, folder in folders.items()}


def order_of(folder: Any) -> Any:
    name = "get_sheet_order" if isinstance(folder, Folder) else "get_plainsheet_order"
    return getattr(folder, name)()


def set_order(folder: Any, ids: Any) -> None:
    name = "set_sheet_order" if isinstance(folder, Folder) else "set_plainsheet_order"
    getattr(folder, name)(ids)


STORED = {pk: list(ids) for pk, (_, ids) in FOLDERS.items()}


def test_the_order_of_new_rows(folders: dict[int, Any]) -> None:
    assert orders(folders) == STORED


@pytest.mark.parametrize("ids", [[13, 11, 12], [12], [15, 13, 14, 11, 12], ["12", "11", "13"], []])
def test_a_new_order(folders: dict[int, Any], ids: list[Any]) -> None:
    """Ids of other folders change nothing, wherever their rows are."""
    set_order(folders[1], ids)
    ordered = {number: int(pk) for number, pk in enumerate(ids) if int(pk) in STORED[1]}
    sheets = folders[1].sheets.all()
    numbers = {11: 0, 12: 1, 13: 2} | {pk: number for number, pk in ordered.items()}
    assert {sheet.pk: sheet._order for sheet in sheets} == numbers
    assert {**orders(folders), 1: None} == {**STORED, 1: None}


def test_neighbours(folders: dict[int, Any]) -> None:
    first, second, third = folders[1].sheets.all()
    assert first.get_next_in_order() == second
    assert third.get_previous_in_order() == second
    assert second.get_next_in_order() == third
    folders[1].sheets.filter(pk=second.pk).delete()
    assert first.get_next_in_order() == second  # as Django, it remembers
    (again,) = folders[1].sheets.filter(pk=11)
    assert again.get_next_in_order() == third
    for sheet, step in ((third, "next"), (first, "previous")):
        with pytest.raises(type(first).DoesNotExist):
            getattr(sheet, f"get_{step}_in_order")()


def test_a_bound_key(folders: dict[int, Any]) -> None:
    with bound(owner=ONE):
        set_order(folders[1], [13, 12, 11])
        assert list(order_of(folders[1])) == [13, 12, 11]
        assert folders[1].sheets.get(pk=13).get_next_in_order().pk == 12


def test_rows_of_several_keys(db_all: None) -> None:
    """``same_key = False`` allows them."""
    trunk = Trunk.objects.create(pk=1, owner=ONE)
    for pk, owner in ((1, ONE), (2, NEAR), (3, ONE)):
        Leaf.objects.create(pk=pk, owner=owner, trunk=trunk)
    trunk.set_leaf_order([2, 3, 1])
    assert list(trunk.get_leaf_order()) == [2, 3, 1]
    trunk.set_leaf_order(["3", "2", "3", 4, "1"])
    assert dict(trunk.leaves.values_list("pk", "_order")) == {3: 0, 2: 1, 1: 4}
    with pytest.raises(ValueError, match="must have a primary key"):
        trunk.set_leaf_order([None, 1])
    assert Leaf.objects.get(owner=NEAR, pk=2).get_next_in_order().pk == 1


def test_neighbours_of_a_row_without_a_related_row(db_all: None) -> None:
    """On one database they are one list; here each shard would have a part of it."""
    for pk, owner in ((1, ONE), (2, TWO)):
        root = Root.objects.create(pk=pk, owner=owner)
        Root.objects.create(pk=pk + 10, owner=owner, above=root)
        with pytest.raises(ShardKeyRequired, match="rows without 'above'"):
            root.get_next_in_order()
        with pytest.raises(Root.DoesNotExist):
            root.roots.get().get_previous_in_order()
