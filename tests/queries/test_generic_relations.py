"""Generic relations: rows of any model, on the shard of the row, on others, and in the global database.

The matrices compare all methods with one database. Here are the cases that one database has not.
"""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.contenttypes.models import ContentType
from django.contrib.contenttypes.prefetch import GenericPrefetch
from django.core.management import call_command
from django.db import connections
from django.db.models import Count, Exists, Max, OuterRef, Prefetch, Q, aprefetch_related_objects
from django.test.utils import CaptureQueriesContext

from sharded_orm import bound
from sharded_orm.exceptions import (
    BoundKeyMismatch,
    CrossKeyRelation,
    CrossShardRelation,
    DeletionRefused,
    ShardKeyChanged,
    ShardKeyRequired,
)
from tests.photos.models import Board, Event, Pin
from tests.queries.conftest import DATABASES, NEAR, ONE, SHARD, TWO
from tests.queries.twins import World, all_rows, comparable_value
from tests.relatives.sharded.models import Agent, Item, Memo, Note, Passport, Stamp, Sticker

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]


@pytest.fixture
def same_id(worlds: tuple[World, World]) -> tuple[Item, Item]:
    """Two items with one id, on two shards; each has a note."""
    items = []
    for pk, key in ((ONE, 701), (TWO, 702)):
        agent = Agent.objects.get(pk=pk)
        item = Item.objects.create(id=500, name=f"item of {pk}", owner=agent, seller=agent)
        item.notes.create(id=key, name=f"note of {pk}", owner=agent)
        items.append(item)
    return items[0], items[1]


def _note(pk: int) -> Note:
    return Note.objects.scatter().get(pk=pk)


# -- Content types


@pytest.mark.parametrize("alias", [SHARD[ONE], "photos"])
def test_content_types_of_a_shard_are_those_of_the_global_database(
    placed: None, alias: str
) -> None:
    ContentType.objects.clear_cache()
    content_type = ContentType.objects.db_manager(alias).get_for_model(Item)
    assert content_type == ContentType.objects.get(app_label="relatives_sharded", model="item")
    assert content_type._state.db == "default"


def test_the_manager_of_content_types_needs_no_migration(placed: None) -> None:
    output = StringIO()
    call_command("makemigrations", "contenttypes", check=True, dry_run=True, stdout=output)
    assert "No changes" in output.getvalue()


# -- Rows with one id on two shards


def test_a_note_is_about_the_row_of_its_own_shard(same_id: tuple[Item, Item]) -> None:
    assert [_note(pk).content_object.name for pk in (701, 702)] == ["item of 1", "item of 2"]
    notes = Note.objects.scatter().filter(pk__gt=700).order_by("pk")
    for lookup in (
        "content_object",
        GenericPrefetch("content_object", [Item.objects.all()]),
        GenericPrefetch("content_object", [Item.objects.scatter()]),
    ):
        names = [note.content_object.name for note in notes.prefetch_related(lookup)]
        assert names == ["item of 1", "item of 2"]


def test_rows_of_another_shard_are_not_those_of_the_item(same_id: tuple[Item, Item]) -> None:
    assert [[note.pk for note in item.notes.all()] for item in same_id] == [[701], [702]]
    assert list(same_id[0].notes.filter(owner=TWO)) == []
    assert list(Note.objects.filter(item=same_id[1], owner__in=[ONE, TWO])) == [_note(702)]
    items = Item.objects.scatter().filter(pk=500).order_by("name")
    for lookup in ("notes", Prefetch("notes", Note.objects.scatter())):
        assert [
            [note.pk for note in item.notes.all()] for item in items.prefetch_related(lookup)
        ] == [[701], [702]]
    of_two = Prefetch("notes", Note.objects.filter(owner=TWO))
    assert [len(item.notes.all()) for item in items.prefetch_related(of_two)] == [0, 1]


def test_joins_stay_on_the_shard(same_id: tuple[Item, Item]) -> None:
    items = Item.objects.scatter().filter(pk=500)
    assert [item.name for item in items.filter(notes__name="note of 2")] == ["item of 2"]
    assert list(items.annotate(n=Count("notes")).values_list("n", flat=True)) == [1, 1]


def test_several_rows_for_a_row_from_outside_are_refused(same_id: tuple[Item, Item]) -> None:
    Memo.objects.create(id=79, owner_id=ONE, content_object=same_id[0])
    memos = Memo.objects.filter(pk=79)
    lookup = GenericPrefetch("content_object", [Item.objects.scatter()])
    with pytest.raises(CrossShardRelation, match="2 rows of Item"):
        list(memos.prefetch_related(lookup))
    lookup = GenericPrefetch("content_object", [Item.objects.filter(owner=TWO)])
    assert memos.prefetch_related(lookup)[0].content_object == same_id[1]


# -- Joins


@pytest.mark.parametrize("key", [ONE, None])
def test_queries_that_join_a_generic_relation(worlds: tuple[World, World], key: int | None) -> None:
    def rows(world: World, model: str) -> Any:
        model_class = getattr(world.models, model)
        rows = (
            all_rows(model_class, world) if key is None else model_class.objects.filter(owner=key)
        )
        return rows.order_by("pk")

    queries = {
        "filter": lambda world: rows(world, "Item").filter(notes__name__contains="6"),
        "exclude": lambda world: rows(world, "Item").exclude(notes__name__contains="61"),
        "exclude on the other side": lambda world: rows(world, "Note").exclude(
            item__name="item 101"
        ),
        "exists": lambda world: rows(world, "Item").filter(
            Exists(
                world.models.Note.objects.filter(
                    content_type=ContentType.objects.get_for_model(world.models.Item),
                    object_id=OuterRef("pk"),
                    name__contains="6",
                )
            )
        ),
        "latest": lambda world: list(
            rows(world, "Item")
            .annotate(
                note=world.models.Note.objects.filter(item=OuterRef("pk"))
                .order_by("-posted_at", "-pk")
                .values("name")[:1]
            )
            .values_list("pk", "note")
        ),
        "isnull": lambda world: rows(world, "Item").filter(notes=None),
        "count": lambda world: list(
            rows(world, "Item").annotate(n=Count("notes")).values_list("pk", "n")
        ),
        "order": lambda world: list(
            rows(world, "Item")
            .annotate(last=Max("notes__posted_at"))
            .filter(last__isnull=False)
            .order_by("last", "pk")
        ),
        "aggregate": lambda world: rows(world, "Item").aggregate(n=Count("notes")),
        "other side": lambda world: rows(world, "Note").filter(item__name="item 101"),
        "values": lambda world: list(
            rows(world, "Item").order_by("pk", "notes__pk").values_list("pk", "notes__name")
        ),
        "nested prefetch": lambda world: [
            sorted(label.pk for label in note.content_object.labels.all())
            for note in rows(world, "Note")
            .filter(item__isnull=False)
            .prefetch_related("content_object__labels")
        ],
        "prefetch and back": lambda world: [
            note.content_object.pk
            for item in rows(world, "Item").prefetch_related("notes__content_object")
            for note in sorted(item.notes.all(), key=lambda note: note.pk)
        ],
        "prefetch by a queryset that repeats a row": lambda world: [
            note.content_object
            for note in rows(world, "Note")
            .filter(pk=61)
            .prefetch_related(
                GenericPrefetch(
                    "content_object", [world.models.Item.objects.filter(labels__pk__gt=0)]
                )
            )
        ],
        "by a foreign key": lambda world: rows(world, "Shelf").filter(items__notes__stars=1),
    }
    for name, query in queries.items():
        expected, got = (comparable_value(query(world)) for world in worlds)
        assert got == expected, name


def test_a_subquery_whose_rows_may_be_elsewhere_is_refused(worlds: tuple[World, World]) -> None:
    content_type = ContentType.objects.get_for_model(Item)
    of_agents = ContentType.objects.get_for_model(Agent)
    for notes in (
        Note.objects.filter(object_id=OuterRef("pk")),
        Note.objects.filter(content_type=of_agents, object_id=OuterRef("pk")),
        Note.objects.filter(content_type=content_type, object_id=OuterRef("shelf")),
        Note.objects.filter(Q(content_type=content_type) | Q(stars=1), object_id=OuterRef("pk")),
        Note.objects.exclude(content_type=content_type).filter(object_id=OuterRef("pk")),
        Note.objects.filter(content_type__in=[content_type], object_id=OuterRef("pk")),
    ):
        with pytest.raises(CrossShardRelation, match="Filter it by the shard key"):
            list(Item.objects.filter(Exists(notes), owner=ONE))
    with pytest.raises(CrossShardRelation):
        list(Passport.objects.filter(owner=ONE).exclude(memos__name="x"))
    with pytest.raises(CrossShardRelation):
        list(Agent.objects.exclude(remarks__name="x"))


def test_a_join_to_another_database_is_refused(worlds: tuple[World, World]) -> None:
    for rows in (
        Agent.objects.filter(remarks__name="x"),
        Passport.objects.filter(owner=ONE, memos__name="x"),
        Memo.objects.filter(passport__name="x"),
        Note.objects.filter(owner=ONE, agent__name="x"),
    ):
        with pytest.raises(CrossShardRelation, match="cannot reach both"):
            list(rows)


# -- Other groups


def test_a_row_of_another_group_whose_id_carries_the_shard(worlds: tuple[World, World]) -> None:
    boards = [Board.objects.create(name=str(number)) for number in range(4)]
    agent = Agent.objects.get(pk=ONE)
    for number, board in enumerate(boards):
        Note.objects.create(
            id=800 + number, name="about a board", owner=agent, content_object=board
        )
    Memo.objects.create(id=80, name="about a board", owner=agent, content_object=boards[0])
    assert _note(800).content_object == boards[0]
    assert Memo.objects.get(pk=80).content_object == boards[0]
    notes = Note.objects.filter(owner=ONE, pk__gte=800).order_by("pk")
    assert [note.content_object for note in notes.prefetch_related("content_object")] == boards
    (memo,) = Memo.objects.filter(pk=80).prefetch_related("content_object")
    assert memo.content_object == boards[0]


def test_a_row_of_another_group_whose_shard_is_unknown(worlds: tuple[World, World]) -> None:
    event = Event.objects.create(account="ada")
    agent = Agent.objects.get(pk=ONE)
    Note.objects.create(id=800, name="about an event", owner=agent, content_object=event)
    with pytest.raises(ShardKeyRequired, match="filter by it"):
        assert _note(800).content_object
    notes = Note.objects.filter(owner=ONE, pk=800)
    with pytest.raises(ShardKeyRequired, match="filter by it"):
        list(notes.prefetch_related("content_object"))
    lookup = GenericPrefetch("content_object", [Event.objects.filter(account="ada")])
    assert notes.prefetch_related(lookup)[0].content_object == event


# -- The shard of the row


def test_the_row_is_looked_up_where_the_key_of_a_new_note_leads(
    worlds: tuple[World, World],
) -> None:
    content_type = ContentType.objects.get_for_model(Item)
    note = Note(id=800, owner_id=ONE, content_type=content_type, object_id=101)
    assert note.content_object == Item.objects.get(owner=ONE, pk=101)
    note = Note(id=800, owner_id=TWO, content_type=content_type, object_id=101)
    assert note.content_object is None


def test_a_note_of_another_shard_is_refused_when_it_is_made(worlds: tuple[World, World]) -> None:
    item = Item.objects.get(owner=TWO, pk=102)
    with pytest.raises(CrossShardRelation, match="same shard key"):
        Note(id=800, owner_id=ONE, content_object=item)
    note = Note(id=800, content_object=item)
    note.owner_id = ONE
    with pytest.raises(CrossShardRelation):
        note.save()
    with pytest.raises(CrossShardRelation):
        Note.objects.bulk_create([note])
    assert not Note.objects.scatter().filter(pk=800).exists()


def test_a_new_note_is_not_about_an_id_that_its_shard_lacks(worlds: tuple[World, World]) -> None:
    about = ContentType.objects.get_for_model(Item)
    values: dict[str, Any] = {"content_type": about, "object_id": 101}
    for create in (
        lambda: Note.objects.create(id=800, owner_id=TWO, **values),
        lambda: Note.objects.bulk_create([Note(id=800, owner_id=TWO, **values)]),
        lambda: Note.objects.get_or_create(id=800, owner=Agent.objects.get(pk=TWO), **values),
        lambda: Note.objects.using(SHARD[TWO]).bulk_create([Note(id=800, owner_id=TWO, **values)]),
        lambda: Note.objects.create(id=800, owner_id=NEAR, **values),
    ):
        with pytest.raises(CrossShardRelation, match="same shard key"):
            create()
    assert not Note.objects.scatter().filter(pk=800).exists()
    Note.objects.create(id=800, owner_id=ONE, **values)
    Note.objects.bulk_create([Note(id=801, owner_id=ONE, **values)])
    pks = Item.objects.get(owner=ONE, pk=101).notes.order_by("pk").values_list("pk", flat=True)
    assert list(pks) == [61, 62, 800, 801]


def test_a_new_note_may_be_about_a_row_that_was_just_deleted(worlds: tuple[World, World]) -> None:
    item = Item.objects.get(owner=ONE, pk=101)
    note = Note(id=800, owner_id=ONE, content_object=item)
    Item.objects.filter(owner=ONE, pk=101).delete()
    note.save()
    assert _note(800).object_id == 101
    assert _note(800).content_object is None


def test_creating_by_the_manager_looks_nothing_up(worlds: tuple[World, World]) -> None:
    item = Item.objects.get(owner=ONE, pk=101)
    notes = item.notes
    with CaptureQueriesContext(connections[SHARD[ONE]]) as captured:
        notes.create(id=800, owner_id=ONE)
    assert [query["sql"].split()[0] for query in captured if "note" in query["sql"]] == ["INSERT"]


def test_assignments_are_forgotten_when_the_ids_change(worlds: tuple[World, World]) -> None:
    note = _note(61)
    assert note.content_object.pk == 101
    note.object_id = 104
    assert note.content_object.pk == 104
    note.content_object = None
    note.save()
    assert _note(61).content_object is None


def test_a_generated_key_is_of_the_shard_of_the_row(placed: None) -> None:
    for number in range(8):
        board = Board.objects.create(name=str(number))
        sticker = Sticker.objects.create(name="s", content_object=board)
        assert sticker._state.db == board._state.db
        assert Sticker.objects.get(pk=sticker.pk).content_object == board


def test_the_id_of_the_row_may_be_the_shard_key(worlds: tuple[World, World]) -> None:
    one, two = Agent.objects.get(pk=ONE), Agent.objects.get(pk=TWO)
    stamp = one.stamps.create(id=1)
    assert stamp._state.db == SHARD[ONE]
    assert list(one.stamps.all()) == [stamp]
    assert Stamp.objects.get(object_id=ONE).content_object == one
    agents = Agent.objects.filter(pk__in=[ONE, TWO, NEAR]).prefetch_related("stamps")
    assert {agent.pk: len(agent.stamps.all()) for agent in agents} == {ONE: 1, TWO: 0, NEAR: 0}
    one.stamps.add(stamp)
    with pytest.raises(ShardKeyChanged):
        two.stamps.add(stamp)
    with pytest.raises(ShardKeyChanged):
        two.stamps.add(stamp, bulk=False)
    assert list(one.stamps.all()) == [stamp]


# -- Deletion


def test_notes_are_deleted_with_their_item(worlds: tuple[World, World]) -> None:
    assert Item.objects.get(owner=ONE, pk=101).delete()[1]["relatives_sharded.Note"] == 2
    assert Item.objects.filter(owner=TWO).delete()[1]["relatives_sharded.Note"] == 1
    pks = Note.objects.scatter().order_by("pk").values_list("pk", flat=True)
    assert list(pks) == [64, 65, 66, 67]


@pytest.mark.parametrize(("model", "pk", "rows"), [(Agent, TWO, Note), (Passport, 30 + TWO, Memo)])
def test_a_row_is_not_deleted_before_the_rows_about_it_that_are_elsewhere(
    worlds: tuple[World, World], model: Any, pk: int, rows: Any
) -> None:
    row = model.objects.scatter().get(pk=pk)
    about = rows.objects.scatter().filter(
        content_type=ContentType.objects.get_for_model(row), object_id=pk
    )
    for delete in (row.delete, model.objects.scatter().filter(pk=pk).delete):
        with pytest.raises(CrossShardRelation, match="Delete them first"):
            delete()
    assert about.count() == 2
    about.delete()
    row.delete()
    assert not model.objects.scatter().filter(pk=pk).exists()


def test_rows_of_two_shards_with_one_id_protect_a_row(same_id: tuple[Item, Item]) -> None:
    agent = Agent.objects.create(id=90, name="agent")
    for key in (ONE, TWO):
        Note.objects.create(id=790, name=f"note of {key}", owner_id=key, content_object=agent)
    with pytest.raises(DeletionRefused) as refused:
        agent.delete()
    protected = refused.value.protected_objects
    assert sorted(map(str, protected)) == ["note of 1", "note of 2"]
    assert DeletionRefused("…", [*protected, *protected]).protected_objects == protected


# -- Costs, and the event loop


def test_a_prefetch_sends_one_query_for_each_shard(worlds: tuple[World, World]) -> None:
    ContentType.objects.get_for_model(Item)
    notes = Note.objects.scatter().filter(pk__lt=65).prefetch_related("content_object")
    with CaptureQueriesContext(connections[SHARD[ONE]]) as captured:
        assert [note.content_object.pk for note in notes.order_by("pk")] == [101, 101, 102, 103]
    assert len(captured) == 2
    ContentType.objects.get_for_model(Agent)
    notes = Note.objects.filter(owner__in=[ONE, TWO], pk__in=[65, 66])
    with CaptureQueriesContext(connections["default"]) as captured:
        assert {n.content_object.pk for n in notes.prefetch_related("content_object")} == {TWO}
    assert len(captured) == 1


def test_asynchronous_reads(worlds: tuple[World, World]) -> None:
    async def read() -> Any:
        note = await Note.objects.aget(owner=ONE, pk=61)
        await aprefetch_related_objects([note], "content_object")
        item = note.content_object
        return [pk async for pk in item.notes.order_by("pk").values_list("pk", flat=True)]

    assert async_to_sync(read)() == [61, 62]


# -- Under a bound key


@pytest.mark.parametrize("key", [ONE, NEAR, TWO])
def test_the_row_is_found_under_any_bound_key(worlds: tuple[World, World], key: int) -> None:
    Pin.objects.create(pk=TWO, note="about")
    about: Any = Pin.objects.get(pk=TWO)
    memo = Memo.objects.create(id=900, name="m", owner_id=ONE, content_object=about)
    with bound(id=key):
        assert Memo.objects.get(pk=memo.pk).content_object == about
        [read] = Memo.objects.filter(pk=memo.pk).prefetch_related("content_object")
        assert read.content_object == about


@pytest.mark.parametrize("key", [ONE, NEAR, TWO])
def test_a_bound_key_does_not_tell_the_shard_of_the_row(
    worlds: tuple[World, World], key: int
) -> None:
    passport = Passport.objects.scatter().first()
    memo = Memo.objects.create(id=900, name="m", owner_id=ONE, content_object=passport)
    with bound(owner=key), pytest.raises(ShardKeyRequired):
        _ = Memo.objects.get(pk=memo.pk).content_object


def test_a_note_of_another_key_is_not_removed(worlds: tuple[World, World]) -> None:
    agent = Agent.objects.get(pk=ONE)
    note = agent.remarks.create(id=900, name="n", owner_id=TWO)
    with bound(owner=ONE), pytest.raises(BoundKeyMismatch):
        agent.remarks.remove(note)
    agent.remarks.remove(note)
    assert not Note.objects.scatter().filter(pk=900).exists()


def test_a_note_of_another_key_does_not_lead_to_its_row(same_id: tuple[Item, Item]) -> None:
    note = _note(701)
    with bound(owner=TWO):
        with pytest.raises(BoundKeyMismatch):
            _ = note.content_object
    with bound(owner=ONE):
        assert note.content_object == same_id[0]


def test_a_note_whose_key_was_not_loaded(worlds: tuple[World, World]) -> None:
    item = Item.objects.create(id=900, name="i", owner_id=NEAR, seller_id=ONE)
    Note.objects.create(id=900, name="n", owner_id=ONE)
    note = Note.objects.only("name").get(owner=ONE, pk=900)
    note.content_object = item
    with pytest.raises(CrossKeyRelation):
        note.save()
    with pytest.raises(CrossKeyRelation):
        note.save(update_fields=["content_type", "object_id"])
