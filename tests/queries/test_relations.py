"""Relations to rows that do not name a shard, and to rows of another shard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.db import connections, models, transaction
from django.db.models import Prefetch, prefetch_related_objects
from django.test import TestCase
from django.test.utils import isolate_apps

from sharded_orm.exceptions import CrossShardRelation, ShardKeyChanged, ShardKeyRequired
from sharded_orm.models import ShardedModel
from tests.photos.models import Board, Event
from tests.queries.conftest import DATABASES, NEAR, ONE, SHARD, TWO
from tests.relatives.sharded.models import Agent, Badge, City, Cover, Item, Label, Passport, Shelf

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]


@pytest.fixture
def agents(placed: None) -> dict[int, Agent]:
    return {key: Agent.objects.create(id=key, name=f"agent {key}") for key in (ONE, TWO, NEAR)}


@pytest.fixture
def items(agents: dict[int, Agent]) -> dict[int, Item]:
    """An item of each agent, bought and sold by NEAR; its id is its owner's."""
    return {
        key: Item.objects.create(
            id=key, name=f"of {key}", owner=agent, buyer=agents[NEAR], seller=agents[NEAR]
        )
        for key, agent in agents.items()
    }


def buyers() -> dict[int, int | None]:
    found: dict[int, int | None] = dict(Item.objects.scatter().values_list("id", "buyer_id"))
    return found


# -- A second relation to the model of the key -----------------------------------------


@pytest.mark.parametrize("change", ["clear", "set"])
def test_what_is_about_all_rows_of_a_row_that_tells_no_shard_is_refused(
    items: dict[int, Item], agents: dict[int, Agent], change: str
) -> None:
    bought = agents[NEAR].bought
    for arguments in ((), ([],), ([items[ONE]],)):
        if (change == "set") == bool(arguments):
            with pytest.raises(ShardKeyRequired, match=r"\.scatter\(\)"):
                getattr(bought, change)(*arguments)
    assert buyers() == {ONE: NEAR, TWO: NEAR, NEAR: NEAR}
    bought.scatter().update(buyer=None)
    assert buyers() == {ONE: None, TWO: None, NEAR: None}


@pytest.mark.parametrize("bulk", [True, False])
def test_rows_of_several_shards_are_added_and_removed(
    items: dict[int, Item], agents: dict[int, Agent], bulk: bool
) -> None:
    agents[NEAR].bought.remove(items[TWO], items[ONE], bulk=bulk)
    assert buyers() == {ONE: None, TWO: None, NEAR: NEAR}
    agents[TWO].bought.add(items[TWO], items[ONE], bulk=bulk)
    assert buyers() == {ONE: TWO, TWO: TWO, NEAR: NEAR}
    agents[ONE].sold.set(items.values(), bulk=bulk)
    assert set(Item.objects.scatter().values_list("seller_id", flat=True)) == {ONE}


def test_a_row_that_is_created_goes_by_its_key(agents: dict[int, Agent]) -> None:
    for key in (ONE, TWO):
        made = agents[NEAR].bought.create(id=key, name="x", owner=agents[key], seller=agents[TWO])
        assert made._state.db == SHARD[key]
        found = agents[NEAR].bought.get_or_create(owner=agents[key], id=key)
        assert found == (made, False)
    with pytest.raises(ShardKeyRequired, match="owner is None"):
        agents[NEAR].bought.create(id=9, name="x", seller=agents[TWO])


def test_a_row_that_tells_no_shard_is_read_as_any_query(
    items: dict[int, Item], agents: dict[int, Agent]
) -> None:
    bought = agents[NEAR].bought
    assert bought.get(owner=TWO) == items[TWO]
    assert bought.using(SHARD[TWO]).get() == items[TWO]
    assert set(bought.scatter()) == set(items.values())
    assert set(bought(manager="objects").scatter()) == set(items.values())
    with pytest.raises(ShardKeyRequired, match=r"\.scatter\(\)"):
        list(bought.all())
    with pytest.raises(ShardKeyRequired):
        agents[NEAR].badge  # noqa: B018


@pytest.mark.parametrize("relation", ["bought", "items"])
def test_prefetches_of_rows_in_the_global_database(
    items: dict[int, Item], agents: dict[int, Agent], relation: str
) -> None:
    found = Agent.objects.prefetch_related(Prefetch(relation, Item.objects.scatter()))
    got = {agent.pk: {item.pk for item in getattr(agent, relation).all()} for agent in found}
    if relation == "items":
        assert got == {ONE: {ONE}, TWO: {TWO}, NEAR: {NEAR}}
    else:
        assert got == {ONE: set(), TWO: set(), NEAR: {ONE, TWO, NEAR}}


def test_one_to_one_from_the_global_database(agents: dict[int, Agent]) -> None:
    passports = {
        key: Passport.objects.create(id=key, owner=agents[key], name="p") for key in (ONE, TWO)
    }
    badge = Badge.objects.create(id=1, owner=agents[TWO], holder=agents[ONE], name="b")
    prefetched = Agent.objects.prefetch_related("passport").in_bulk()
    assert [prefetched[key].passport for key in (ONE, TWO)] == list(passports.values())
    assert Agent.objects.get(pk=TWO).passport == passports[TWO]
    with pytest.raises(Passport.DoesNotExist):
        Agent.objects.create(id=77, name="without a shard").passport  # noqa: B018
    with pytest.raises(ShardKeyRequired, match="Badge"):
        list(Agent.objects.prefetch_related("badge"))
    several = Agent.objects.prefetch_related(Prefetch("badge", Badge.objects.scatter()))
    assert several.get(pk=ONE).badge == badge


def test_a_plain_model_that_sharded_rows_refer_to(
    items: dict[int, Item], agents: dict[int, Agent]
) -> None:
    city = City.objects.create(id=5, name="c")
    city.items.add(items[ONE], items[TWO])
    assert set(city.items.scatter()) == {items[ONE], items[TWO]}
    (found,) = City.objects.prefetch_related(Prefetch("items", Item.objects.scatter()))
    assert set(found.items.all()) == {items[ONE], items[TWO]}


def test_a_key_that_was_not_loaded_is_not_changed(
    items: dict[int, Item], agents: dict[int, Agent]
) -> None:
    row = Item.objects.filter(owner=ONE).defer("owner").get()
    with pytest.raises(ShardKeyChanged):
        agents[NEAR].items.add(row)
    assert Item.objects.get(owner=ONE) == items[ONE]


# -- Rows of another shard ----------------------------------------------------------------


@pytest.fixture
def labels(agents: dict[int, Agent]) -> dict[int, Label]:
    return {
        key: Label.objects.create(id=key, name=f"of {key}", owner=agent)
        for key, agent in agents.items()
    }


@pytest.mark.parametrize("change", ["add", "set"])
def test_a_primary_key_of_another_shard_is_refused(
    items: dict[int, Item], labels: dict[int, Label], change: str
) -> None:
    own = items[ONE].labels
    own.add(labels[ONE])
    another = Label.objects.create(id=4, name="another", owner=labels[ONE].owner)
    with pytest.raises(CrossShardRelation, match=r"no Label with id in \[2, 3\]"):
        getattr(own, change)(*([TWO, NEAR, 4],) if change == "set" else (TWO, NEAR, 4))
    assert list(own.all()) == [labels[ONE]]
    getattr(own, change)(*([ONE, 4],) if change == "set" else (ONE, 4))
    assert set(own.all()) == {labels[ONE], another}


@pytest.fixture
def equal(agents: dict[int, Agent]) -> dict[int, dict[str, Any]]:
    """Rows on two shards that have the same primary keys, related on each side."""
    found = {}
    for key in (ONE, TWO):
        shelf = Shelf.objects.create(id=7, name="s", owner=agents[key])
        label = Label.objects.create(id=7, name="l", owner=agents[key])
        item = Item.objects.create(
            id=7, name="i", owner=agents[key], seller=agents[key], shelf=shelf
        )
        item.labels.add(label)
        found[key] = {"shelf": shelf, "label": label, "item": item}
    return found


@pytest.mark.parametrize("change", ["remove", "set", "add"])
@pytest.mark.parametrize("relation", [("item", "labels", "label"), ("shelf", "items", "item")])
def test_an_equal_primary_key_of_another_shard_is_another_row(
    equal: dict[int, dict[str, Any]], change: str, relation: tuple[str, str, str]
) -> None:
    source, accessor, target = relation
    manager = getattr(equal[ONE][source], accessor)
    other = equal[TWO][target]
    with pytest.raises(CrossShardRelation):
        getattr(manager, change)([other] if change == "set" else other)
    for key in (ONE, TWO):
        assert list(getattr(equal[key][source], accessor).all()) == [equal[key][target]]


def test_a_key_beside_a_related_manager_does_not_lead_to_another_shard(
    equal: dict[int, dict[str, Any]],
) -> None:
    assert list(equal[ONE]["item"].labels.filter(owner=TWO)) == []
    assert list(equal[ONE]["shelf"].items.filter(owner=TWO)) == []


# -- The automatic table of a many-to-many relation ------------------------------------


def test_rows_of_an_automatic_table_go_by_their_instances(
    items: dict[int, Item], labels: dict[int, Label]
) -> None:
    through: Any = Item.labels.through
    made = through.objects.bulk_create(
        [through(item=items[key], label=labels[key]) for key in (ONE, TWO)]
    )
    assert [row._state.db for row in made] == [SHARD[ONE], SHARD[TWO]]
    third = through(item=items[NEAR], label=labels[NEAR])
    third.save()
    assert third._state.db == SHARD[NEAR]
    another = Label.objects.create(id=4, name="another", owner=labels[ONE].owner)
    created = through.objects.create(item=items[ONE], label=another)
    assert created._state.db == SHARD[ONE]
    assert through.objects.filter(item=items[TWO]).get() == made[1]
    assert through.objects.filter(item__owner=TWO).get() == made[1]
    assert through.objects.filter(item=items[ONE], label=labels[ONE]).delete()[0] == 1
    assert through.objects.scatter().count() == 3
    with pytest.raises(ShardKeyRequired, match=r"filter\(item=…\)"):
        list(through.objects.all())
    with pytest.raises(ShardKeyRequired, match="item="):
        through(item_id=ONE, label_id=ONE).save()


def test_rows_of_an_automatic_table_relate_rows_of_one_shard(
    items: dict[int, Item], labels: dict[int, Label]
) -> None:
    through: Any = Item.labels.through
    with pytest.raises(CrossShardRelation):
        through(item=items[ONE], label=labels[TWO])
    row = through(item=items[ONE], label=labels[ONE])
    for alias in (SHARD[TWO], "default"):
        with pytest.raises(CrossShardRelation), transaction.atomic(using=alias):
            row.save(using=alias)
    with pytest.raises(CrossShardRelation):
        through.objects.using(SHARD[TWO]).bulk_create([row])
    assert not through.objects.scatter().exists()


def test_one_to_one_inside_the_group(items: dict[int, Item], agents: dict[int, Agent]) -> None:
    covers = [
        Cover.objects.create(id=key, owner=agents[key], item=items[key], name="c")
        for key in (ONE, TWO)
    ]
    mixed = [Item.objects.get(owner=key) for key in (ONE, TWO)]
    prefetch_related_objects(mixed, "cover")
    assert [item.cover for item in mixed] == covers
    assert Item.objects.get(owner=TWO).cover == covers[1]
    assert connections[SHARD[TWO]].alias == covers[1]._state.db


# -- Writes that name a row of another shard ----------------------------------------------


def test_a_write_that_names_a_row_of_another_shard_is_refused(
    equal: dict[int, dict[str, Any]], agents: dict[int, Agent]
) -> None:
    elsewhere = equal[TWO]["shelf"]
    own = Item.objects.filter(owner=ONE)
    later = Item(id=8, name="later", shelf=elsewhere, seller=agents[ONE])
    later.owner_id = ONE
    fine = Item(id=9, name="fine", owner=agents[NEAR], seller=agents[ONE])
    for write in (
        lambda: own.update(shelf=elsewhere),
        lambda: Item.objects.filter(owner__in=[ONE, TWO]).update(shelf=elsewhere),
        lambda: Item.objects.bulk_create([fine, later]),
        lambda: Item.objects.get_or_create(owner=agents[ONE], shelf=elsewhere),
        lambda: Item.objects.update_or_create(
            {"name": "other"}, owner=agents[ONE], shelf=elsewhere
        ),
    ):
        with pytest.raises(CrossShardRelation, match="the same shard key"):
            write()
    for key in (ONE, TWO):
        assert list(equal[key]["shelf"].items.all()) == [equal[key]["item"]]
        assert Item.objects.get(owner=key).name == "i"
    assert not Item.objects.filter(owner=NEAR).exists()
    assert Item.objects.filter(owner=TWO).update(shelf=elsewhere) == 1


def test_a_row_of_another_shard_is_not_contained(equal: dict[int, dict[str, Any]]) -> None:
    own, other = equal[ONE]["item"], equal[TWO]["item"]
    for rows in (
        Item.objects.filter(owner=ONE),
        equal[ONE]["shelf"].items,
        equal[ONE]["label"].items,
    ):
        assert (rows.contains(own), rows.contains(other)) == (True, False)
        read = rows.all()
        assert len(read) == 1
        assert (read.contains(own), read.contains(other)) == (True, False)
    assert Item.objects.contains(other)
    assert not Item.objects.exclude(name="i").contains(other)
    assert Item.objects.using(SHARD[TWO]).contains(other)


def test_one_row_is_not_chosen_of_those_that_several_shards_have(
    agents: dict[int, Agent],
) -> None:
    for key in (ONE, TWO):
        Badge.objects.create(id=key, owner=agents[key], holder=agents[NEAR], name="b")
    with pytest.raises(CrossShardRelation, match="2 rows of Badge"):
        list(Agent.objects.prefetch_related(Prefetch("badge", Badge.objects.scatter())))


@isolate_apps("tests.photos")
def test_a_foreign_key_to_another_group_whose_ids_tell_the_shard(placed: None) -> None:
    class Hint(ShardedModel):
        user_id = models.BigIntegerField()
        board = models.ForeignKey(Board, models.DO_NOTHING, db_constraint=False, related_name="+")
        event = models.ForeignKey(Event, models.DO_NOTHING, db_constraint=False, related_name="+")

        class Meta:
            app_label = "photos_app"

        class ShardMeta:
            group = "photos"
            shard_key = "user_id"

    boards = [Board.objects.create(name="b") for _ in range(4)]
    event = Event.objects.create(account="a")
    hints = [Hint(user_id=ONE, board_id=board.pk, event_id=event.pk) for board in boards]
    assert hints[0].board == boards[0]
    prefetch_related_objects(hints, "board")
    with TestCase().assertNumQueries(0, using="pins"):
        assert [hint.board for hint in hints] == boards
    with pytest.raises(ShardKeyRequired, match="Event"):
        hints[0].event  # noqa: B018
    assert Hint(user_id=ONE, event=event).event == event
    everything_else = {field.name for field in Hint._meta.fields} - {"board"}
    hints[0].clean_fields(exclude=everything_else)
    for board_id in (boards[0].pk + 10**6, None):
        with pytest.raises(ValidationError, match="board"):
            Hint(user_id=ONE, board_id=board_id).clean_fields(exclude=everything_else)
    with pytest.raises(ShardKeyRequired, match="Event"):
        hints[0].clean_fields(exclude={"board"})


@pytest.mark.parametrize(("order", "label"), [(1, ONE), (-1, ONE), (1, TWO)])
def test_a_fixture_relates_rows_of_the_shard(
    agents: dict[int, Agent], tmp_path: Path, order: int, label: int
) -> None:
    """Loading without a check of its foreign keys would keep any number."""
    Label.objects.create(id=TWO, name="on another shard", owner=agents[TWO])
    values = {"name": "x", "owner": ONE}
    rows = [
        {"model": "relatives_sharded.label", "pk": ONE, "fields": values},
        {
            "model": "relatives_sharded.item",
            "pk": 1,
            "fields": {**values, "seller": ONE, "labels": [label]},
        },
    ]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows[::order]))
    if label == ONE:
        call_command("loaddata", path, database=SHARD[ONE], verbosity=0)
        assert Item.objects.get(owner=ONE).labels.get().pk == ONE
    else:
        with (
            pytest.raises(CommandError, match="no Label with id in"),
            transaction.atomic(using=SHARD[ONE]),
        ):
            call_command("loaddata", path, database=SHARD[ONE], verbosity=0)
        assert not Item.objects.filter(owner=ONE).exists()


def test_excluding_along_a_relation_to_another_database_is_refused(placed: None) -> None:
    with pytest.raises(CrossShardRelation, match="cannot reach both"):
        list(Agent.objects.exclude(items__name="x"))
