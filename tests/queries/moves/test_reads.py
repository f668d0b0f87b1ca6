"""A read whose statement arrives after its key has moved is repeated on the new shard, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.contenttypes.prefetch import GenericPrefetch
from django.db import connections, transaction
from django.db.models import Sum
from django.test.utils import CaptureQueriesContext

import sharded_orm
from sharded_orm.exceptions import KeyMoved
from tests.photos.models import Album, Photo
from tests.queries.conftest import DATABASES
from tests.queries.moves.conftest import KEY
from tests.queries.moves.hand_move import (
    SOURCE,
    TARGET,
    HandMove,
    alias,
    before_statement,
    elsewhere,
)
from tests.relatives.sharded.models import Agent, Item, Note

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]


def photos() -> Any:
    return Photo.objects.filter(user_id=KEY)


RAW = f"SELECT * FROM {Photo._meta.db_table} WHERE user_id = {KEY}"


@async_to_sync
async def _aiterator() -> list[str]:
    return [photo.title async for photo in photos().aiterator()]


@async_to_sync
async def _aget() -> str:
    return (await Photo.objects.aget(user_id=KEY)).title


READS: dict[str, tuple[Callable[[], Any], Any]] = {
    "list": (lambda: [photo.title for photo in photos()], ["p"]),
    "get": (lambda: Photo.objects.get(user_id=KEY).title, "p"),
    "first": (lambda: photos().first().title, "p"),
    "values": (lambda: list(photos().values_list("title", flat=True)), ["p"]),
    "iterator": (lambda: [photo.title for photo in photos().iterator()], ["p"]),
    "aiterator": (_aiterator, ["p"]),
    "aget": (_aget, "p"),
    "count": (lambda: photos().count(), 1),
    "exists": (lambda: photos().exists(), True),
    "aggregate": (lambda: photos().aggregate(Sum("stars")), {"stars__sum": 1}),
    "in_bulk": (lambda: [photo.title for photo in photos().in_bulk().values()], ["p"]),
    "raw": (lambda: [photo.title for photo in photos().raw(RAW)], ["p"]),
    "raw iterator": (lambda: [photo.title for photo in photos().raw(RAW).iterator()], ["p"]),
    "several keys": (
        lambda: [p.title for p in Photo.objects.filter(user_id__in=[KEY, KEY + 1])],
        ["p"],
    ),
    "joined": (lambda: [p.title for p in photos().select_related("album")], ["p"]),
    "prefetched": (
        lambda: [
            len(album.photos.all())
            for album in Album.objects.filter(owner_id=KEY).prefetch_related("photos")
        ],
        [1],
    ),
}

every_read = pytest.mark.parametrize("name", READS)


@every_read
def test_a_read_that_arrives_after_the_switch_is_repeated(move: HandMove, name: str) -> None:
    read, expected = READS[name]
    move.announce()
    with before_statement(SOURCE, move.switch):
        assert read() == expected
    move.settle()
    assert read() == expected


@every_read
def test_a_read_of_a_process_that_was_paused_during_a_whole_move_is_repeated(
    move: HandMove, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is not in flight before and after: only the clock tells that the lease was over."""
    from sharded_orm.routing import placement_lease

    read, expected = READS[name]
    assert read() == expected
    ahead, clock = [0.0], placement_lease.now
    monkeypatch.setattr(placement_lease, "now", lambda: clock() + ahead[0])

    def pause() -> None:
        lease = sharded_orm.runtime.placement_lease()
        poll = lease._poll
        move.whole()
        # What the process knew before the pause.
        lease._poll = poll
        ahead[0] += 60.0

    with before_statement(SOURCE, pause):
        assert read() == expected


@pytest.mark.parametrize("outer", [alias(SOURCE), "photos"])
def test_inside_a_transaction_the_read_is_refused(move: HandMove, outer: str) -> None:
    move.announce()
    # The rows are read in an earlier transaction: a mover waits for writers, and this is a reader.
    with pytest.raises(KeyMoved, match="Run the transaction or the query again"):
        with transaction.atomic(outer):
            with before_statement(SOURCE, elsewhere(move.switch)):
                list(photos())
    assert [photo.title for photo in photos()] == ["p"]


def test_an_iterator_is_confirmed_with_its_first_row(move: HandMove) -> None:
    Photo.objects.create(user_id=KEY, title="p2")
    move.announce()
    rows = photos().order_by("title").iterator(chunk_size=1)
    assert next(rows).title == "p"
    # The rest is of the same snapshot.
    assert [row.title for row in rows] == ["p2"]


def test_a_missing_row_is_looked_for_on_the_new_shard(move: HandMove) -> None:
    move.announce()
    with before_statement(SOURCE, move.switch), pytest.raises(Photo.DoesNotExist):
        Photo.objects.get(user_id=KEY, title="no")


def test_nothing_more_is_asked_while_nothing_moves(move: HandMove) -> None:
    list(photos())
    with CaptureQueriesContext(connections["directory"]) as directory:
        with CaptureQueriesContext(connections[alias(SOURCE)]) as source:
            list(photos())
            photos().count()
            list(photos().iterator())
    assert (len(directory), len(source)) == (0, 3)


def test_a_key_in_flight_costs_two_look_ups_and_other_keys_none(move: HandMove) -> None:
    other = Photo.objects.create(user_id=KEY + 7, title="o")
    move.announce()
    list(Photo.objects.filter(user_id=KEY + 7))
    with CaptureQueriesContext(connections["directory"]) as directory:
        assert Photo.objects.get(user_id=KEY + 7) == other
    assert len(directory) == 0
    # While its plan is made, a read locates its key once more.
    for _ in range(2):
        assert list(photos().values_list("title", flat=True)) == ["p"]
    with CaptureQueriesContext(connections["directory"]) as directory:
        assert list(photos().values_list("title", flat=True)) == ["p"]
    assert len(directory) == 2
    move.switch()
    assert photos().get()._state.db == alias(TARGET)


# ##### Querysets from before the move #####


def test_raw_sql_from_before_the_move_runs_on_the_new_shard(move: HandMove) -> None:
    rows = photos().prefetch_related("comments").raw(RAW)
    some = rows.prefetch_related("album")
    move.whole()
    assert [(photo.title, photo._state.db) for photo in rows] == [("p", alias(TARGET))]
    assert [(photo.album.title, len(photo.comments.all())) for photo in some] == [("a", 1)]


def test_rows_of_a_generic_relation_from_before_the_move(move: HandMove) -> None:
    agent = Agent.objects.create(pk=KEY, name="agent")
    item = Item.objects.create(id=1, owner=agent, seller=agent, name="i")
    Note.objects.create(id=1, owner=agent, content_object=item, name="n")
    move.tables |= {Item._meta.db_table: "owner_id", Note._meta.db_table: "owner_id"}
    notes = item.notes.all()
    items = Item.objects.filter(owner=agent)
    move.whole()
    assert [note.name for note in notes] == ["n"]
    assert [note.name for item in items.prefetch_related("notes") for note in item.notes.all()] == [
        "n"
    ]
    about = Note.objects.filter(owner=agent)
    rows = GenericPrefetch("content_object", [Item.objects.all()])
    assert [note.content_object.name for note in about.prefetch_related(rows)] == ["i"]


def test_contains(move: HandMove) -> None:
    photo = photos().get()
    move.announce()
    with before_statement(SOURCE, move.switch):
        assert photos().contains(photo)
    assert photos().contains(photo)
