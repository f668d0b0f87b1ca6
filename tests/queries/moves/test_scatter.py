"""Statements for several shards see and write each row once while keys move between these shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connections, transaction
from django.db.models import Count, Exists, F, Max, OuterRef, Q, Subquery, Sum
from django.test.utils import CaptureQueriesContext

from sharded_orm import runtime, scatter
from sharded_orm.exceptions import KeyMoved, UnknownKeyOfRows
from sharded_orm.models import KeyMove
from sharded_orm.models.sharding.rows_of_keys import RowsOfKeys
from sharded_orm.models.tables.directory import DatabaseDirectory
from sharded_orm.operations.nodes import node_connection
from sharded_orm.operations.shards import misplaced_rows
from sharded_orm.operations.shards.misplaced_rows import RowScan
from sharded_orm.routing.placement_lease import KeyInFlight
from sharded_orm.scatter import Target
from tests.authors.models import Author, Book, Novel, Page
from tests.photos.models import Album, Comment, Photo, Tag, Vote
from tests.queries.conftest import DATABASES
from tests.queries.moves.conftest import KEY
from tests.queries.moves.hand_move import (
    SOURCE,
    TARGET,
    HandMove,
    alias,
    before_scatter_reads,
    before_statement,
)
from tests.samples.models import Handle, Letter

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]

#: Keys beside the one that moves: on its source, on its target, and elsewhere.
NEAR, BEYOND, FAR = KEY + 1, KEY + 2, KEY + 3
THROUGH = Photo.tags.through


def of_row(table: str, column: str, referred: Any, key: str) -> str:
    """Return SQL for the key of a row that a foreign key leads to."""
    other = referred._meta
    return f"(SELECT o.{key} FROM {other.db_table} o WHERE o.{other.pk.column} = {table}.{column})"


TABLES = {
    Album._meta.db_table: "owner_id",
    Tag._meta.db_table: "user_id",
    Photo._meta.db_table: "user_id",
    Comment._meta.db_table: "user_id",
    Vote._meta.db_table: "user_id",
    THROUGH._meta.db_table: of_row(THROUGH._meta.db_table, "photo_id", Photo, "user_id"),
    Book._meta.db_table: "author_id",
    Novel._meta.db_table: of_row(Novel._meta.db_table, "book_ptr_id", Book, "author_id"),
    Page._meta.db_table: "author_id",
}


@pytest.fixture
def moving(move: HandMove) -> HandMove:
    """Rows of four keys in every kind of table, and the move of one of them."""
    store = runtime.strategy("photos").store  # type: ignore[attr-defined]
    places = {KEY: SOURCE, NEAR: SOURCE, BEYOND: TARGET, FAR: 7}
    store.place("photos", {str(key): shard for key, shard in places.items()})
    number = 100
    for key in places:
        Author.objects.create(pk=key)
        album = Album.objects.create(owner_id=key, title=f"album {key % 3}")
        tag = Tag.objects.create(id=number, user_id=key, name=f"tag {key % 2}")
        for stars in (1, 2, None):
            number += 1
            photo = Photo.objects.create(
                user_id=key,
                album=album if stars else None,
                title=f"photo {number % 4}",
                stars=stars,
            )
            Comment.objects.create(user_id=key, photo=photo, text="x")
            THROUGH.objects.create(id=number, photo=photo, tag=tag)
            Vote.objects.create(user_id=key, number=number, value=number % 5)
        number += 1
        novel = Novel.objects.create(id=number, author_id=key)
        Page.objects.create(id=number, author_id=key, book_id=novel.pk)
    return HandMove(KEY, TABLES)


def photos() -> Any:
    return Photo.objects.scatter()


@async_to_sync
async def _aiterator() -> list[Any]:
    return sorted([photo.pk async for photo in photos().aiterator(chunk_size=2)])


@async_to_sync
async def _asynchronous() -> list[Any]:
    return [
        await photos().acount(),
        await photos().aaggregate(Sum("stars")),
        await photos().filter(user_id__gt=KEY).aexists(),
        sorted([photo.pk async for photo in photos()]),
    ]


SHAPES: dict[str, Callable[[], Any]] = {
    "list": lambda: sorted(photo.pk for photo in photos()),
    "ordered": lambda: list(photos().order_by("title", "-stars", "pk").values_list("pk", "title")),
    "limit": lambda: [photo.pk for photo in photos().order_by("-pk")[1:6]],
    "first": lambda: photos().order_by("user_id", "pk").first().title,
    "several keys": lambda: sorted(
        Photo.objects.filter(user_id__in=[KEY, BEYOND]).values_list("pk", flat=True)
    ),
    "keys by OR": lambda: Photo.objects.filter(Q(user_id=KEY) | Q(user_id=BEYOND)).count(),
    "keys by OR and column": lambda: sorted(
        Photo.objects.filter(Q(user_id=KEY, stars=1) | Q(user_id=BEYOND)).values_list("pk")
    ),
    "count": lambda: photos().count(),
    "count of a slice": lambda: photos().order_by("pk")[2:100].count(),
    "exists": lambda: photos().filter(title__gt="", stars=9).exists(),
    "aggregate": lambda: photos().aggregate(
        Count("pk"), Sum("stars"), Max("pk"), titles=Count("title", distinct=True)
    ),
    "distinct": lambda: sorted(photos().values_list("title").distinct()),
    "groups": lambda: sorted(photos().values_list("title").annotate(Count("pk"), Sum("stars"))),
    "groups by key": lambda: sorted(
        photos().values_list("user_id").annotate(n=Count("pk")).filter(n__gt=1)
    ),
    "values": lambda: sorted(photos().values_list("pk", "album__title"), key=str),
    "iterator": lambda: sorted(photo.pk for photo in photos().iterator(chunk_size=2)),
    "aiterator": _aiterator,
    "asynchronous": _asynchronous,
    "in_bulk": lambda: sorted(photos().in_bulk()),
    "select_related": lambda: sorted(
        str(photo.album) for photo in photos().select_related("album")
    ),
    "join": lambda: sorted(photos().filter(album__title="album 1").values_list("pk")),
    "outer join": lambda: sorted(
        photos().filter(Q(album__title="album 1") | Q(stars=None)).values_list("pk")
    ),
    "joined rows": lambda: Album.objects.scatter().filter(photos__stars__gt=0).count(),
    "counted rows": lambda: sorted(
        Album.objects.scatter().annotate(n=Count("photos")).values_list("pk", "n")
    ),
    "many to many": lambda: sorted(photos().filter(tags__name="tag 1").values_list("pk")),
    "automatic table": lambda: THROUGH.objects.scatter().count(),
    "automatic table by tag": lambda: sorted(
        THROUGH.objects.scatter().values_list("tag__name").annotate(Count("id"))
    ),
    "exclude rows": lambda: Album.objects.scatter().exclude(photos__stars=1).count(),
    "subquery": lambda: sorted(
        photos()
        .annotate(n=Subquery(Album.objects.filter(pk=OuterRef("album")).values("title")[:1]))
        .values_list("pk", "n"),
        key=str,
    ),
    "exists of rows": lambda: (
        photos().filter(~Exists(Comment.objects.filter(photo=OuterRef("pk")))).count()
    ),
    "exists by key": lambda: (
        photos()
        .filter(Exists(Tag.objects.filter(user_id=OuterRef("user_id"), name="tag 1")))
        .count()
    ),
    "in subquery": lambda: sorted(
        photos().filter(pk__in=Comment.objects.values("photo")).values_list("pk")
    ),
    "prefetched": lambda: sorted(
        (photo.pk, [tag.name for tag in photo.tags.all()], photo.comments.count())
        for photo in photos().prefetch_related("tags", "comments")
    ),
    "composite key": lambda: sorted(Vote.objects.scatter().values_list("number", "value")),
    "child table": lambda: sorted(Novel.objects.scatter().values_list("pk", "author_id")),
    "parent of a child": lambda: sorted(
        Book.objects.scatter().filter(novel__isnull=False).values_list("pk", "pages")
    ),
}


def read_all() -> dict[str, Any]:
    """Read by each shape. All in one test, because rows and a flush take longer than a read."""
    return {name: read() for name, read in SHAPES.items()}


def steps(move: HandMove) -> Iterator[str]:
    """Go through a move step by step, until both shards had rows of the key, and it is over."""
    move.announce()
    for step in (move.publish, move.switch_directory, move.set_aside, move.settle):
        step()
        yield step.__name__


def test_each_row_is_seen_once_at_each_step(moving: HandMove) -> None:
    expected = read_all()
    for step in steps(moving):
        assert (step, read_all()) == (step, expected)


def test_the_copy_of_an_aborted_move_is_not_seen_until_it_is_removed(moving: HandMove) -> None:
    expected = read_all()
    moving.announce()
    moving.publish()
    KeyMove.objects.update(phase="aborted")
    assert read_all() == expected


@pytest.mark.parametrize("begin", ["announced", "published"])
def test_a_read_that_a_switch_overtakes_is_repeated(moving: HandMove, begin: str) -> None:
    """The shards before the target are read before the switch, and the target after it."""
    expected = read_all()
    for name, read in SHAPES.items():
        if "iterator" in name:
            continue  # An iterator cannot be repeated after its first row.
        move = HandMove(KEY, TABLES)
        move.announce()
        if begin == "published":
            move.publish()
            rest: Callable[[], None] = lambda: (move.switch_directory(), move.set_aside())  # type: ignore[assignment, func-returns-value]  # noqa: B023, E731
        else:
            rest = move.switch
        with before_scatter_reads(TARGET, rest):
            assert (name, read()) == (name, expected[name])
        move.settle()
        assert (name, read()) == (name, expected[name])
        HandMove(KEY, TABLES, TARGET, SOURCE).whole()


def test_a_whole_move_between_two_shards_is_noticed(
    moving: HandMove, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was paused for longer than its lease. No key is in flight before and after."""
    from sharded_orm.routing import placement_lease

    expected = photos().count()
    ahead, clock = [0.0], placement_lease.now
    monkeypatch.setattr(placement_lease, "now", lambda: clock() + ahead[0])

    def pause() -> None:
        lease = runtime.placement_lease()
        poll = lease._poll
        moving.whole()
        lease._poll = poll  # type: ignore[assignment]  # what the process knew before the pause
        ahead[0] += 60.0

    with before_scatter_reads(TARGET, pause):
        assert photos().count() == expected


@pytest.mark.parametrize("slow_answers", [1, 4, 5])
def test_a_directory_that_answers_later_than_the_lease_is_asked_again(
    moving: HandMove, monkeypatch: pytest.MonkeyPatch, slow_answers: int
) -> None:
    from sharded_orm.routing import placement_lease

    expected = photos().count()
    moving.announce()
    ahead, clock, ask = [0.0], placement_lease.now, DatabaseDirectory.moves
    monkeypatch.setattr(placement_lease, "now", lambda: clock() + ahead[0])
    slow = [True] * slow_answers

    def answer(*args: Any, **kwargs: Any) -> Any:
        moves = ask(*args, **kwargs)
        if slow:
            slow.pop()
            ahead[0] += 60.0
        return moves

    def look_at_moves() -> int:
        # The lease is valid until now, and a key is in flight, so the next read asks.
        monkeypatch.setattr(DatabaseDirectory, "moves", answer)
        return photos().count()

    if slow_answers < 5:
        assert look_at_moves() == expected
    else:
        with pytest.raises(KeyMoved, match="may have moved meanwhile"):
            look_at_moves()


def test_an_iterator_that_a_switch_overtakes_raises_at_its_end(moving: HandMove) -> None:
    moving.announce()
    rows = photos().order_by("pk").iterator(chunk_size=1)
    next(rows)
    moving.switch()
    with pytest.raises(KeyMoved, match="one by one"):
        list(rows)


def test_no_query_more_while_nothing_moves(
    moving: HandMove, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos().count()
    with CaptureQueriesContext(connections["photos"]) as before:
        photos().count()
    asked: list[Any] = []
    ask = DatabaseDirectory.moves

    def counted(self: Any, since: int | None = None) -> Any:
        asked.append(since)
        return ask(self, since)

    monkeypatch.setattr(DatabaseDirectory, "moves", counted)
    photos().count()
    list(photos().iterator())
    photos().update(stars=F("stars") + 1)
    assert asked == []
    moving.announce()
    asked.clear()
    with CaptureQueriesContext(connections["photos"]) as announced:
        photos().count()
    assert len(asked) == 2
    moving.publish()
    asked.clear()
    photos().count()
    assert len(asked) == 2
    # The key is only announced: no SQL more.
    assert sorted(q["sql"] for q in announced) == sorted(q["sql"] for q in before)


def misplaced() -> set[Any]:
    scan = RowScan(sample=None)
    for shard in (runtime.shard("photos", number) for number in (SOURCE, TARGET)):
        with node_connection(shard.node) as wrapper:
            scan.read(wrapper, [shard], lambda: None)
    assert not scan.errors
    return {stray.key for rows in scan.misplaced for stray in rows.examples}


def test_rows_of_a_key_that_moves_are_not_reported_as_misplaced(
    moving: HandMove, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connections[alias(TARGET)].cursor() as cursor:
        cursor.execute(f"UPDATE {Tag._meta.db_table} SET user_id = %s", [FAR])
    assert misplaced() == {FAR}
    for step in steps(moving):
        assert (step, misplaced()) == (step, {FAR})
    # The move begins and ends between the reading of the rows and the search for their shards.
    back = HandMove(KEY, TABLES, TARGET, SOURCE)
    find = misplaced_rows._homes

    def find_late(*args: Any) -> Any:
        if back.move is None:
            back.whole()
        return find(*args)

    monkeypatch.setattr(misplaced_rows, "_homes", find_late)
    assert misplaced() == {FAR}
    assert back.move is not None


WRITES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "update": (lambda: photos().update(stars=7), lambda: photos().filter(stars=7).count()),
    "update by a join": (
        lambda: photos().filter(album__title__gt="").update(title="new"),
        lambda: photos().filter(title="new").count(),
    ),
    "update of votes": (
        lambda: Vote.objects.scatter().update(value=F("value") + 10),
        lambda: Vote.objects.scatter().aggregate(Sum("value"))["value__sum"],
    ),
    "update of a child": (
        lambda: Novel.objects.scatter().update(translator_id=KEY),
        lambda: Novel.objects.scatter().filter(translator_id=KEY).count(),
    ),
    "update of a parent by a child": (
        lambda: Novel.objects.scatter().update(editor_id=KEY),
        lambda: Book.objects.scatter().filter(editor_id=KEY).count(),
    ),
    "delete": (lambda: Comment.objects.scatter().delete()[0], Comment.objects.scatter().count),
    "delete with cascades": (
        lambda: photos().filter(stars__gte=1).delete(),
        lambda: [photos().count(), Comment.objects.scatter().count()],
    ),
    "delete of an automatic table": (
        lambda: THROUGH.objects.scatter().delete()[0],
        THROUGH.objects.scatter().count,
    ),
}


@pytest.mark.parametrize("step", ["publish", "switch_directory"])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_touches_each_row_once_and_no_copy(moving: HandMove, name: str, step: str) -> None:
    write, read = WRITES[name]
    with transaction.atomic("photos"):
        expected = write(), read()
        transaction.set_rollback(True, "photos")
    moving.announce()
    moving.publish()
    if step == "switch_directory":
        moving.switch_directory()
    copy = TARGET if step == "publish" else SOURCE
    before = _stored(copy)
    assert (write(), read()) == expected
    assert _stored(copy) == before


def _stored(shard: int) -> list[Any]:
    """Return all rows of the key that lie on a shard."""
    rows: list[Any] = []
    for table, column in TABLES.items():
        with connections[alias(shard)].cursor() as cursor:
            cursor.execute(f"SELECT * FROM {table} WHERE {column} = %s", [KEY])
            rows.append((table, sorted(cursor.fetchall(), key=repr)))
    return rows


def test_a_write_that_a_switch_overtakes_is_made_in_part_and_touches_no_copy(
    moving: HandMove,
) -> None:
    moving.announce()
    with before_statement(SOURCE, moving.switch), pytest.raises(KeyMoved) as caught:
        Vote.objects.scatter().update(value=F("value") + 100)
    assert caught.value.is_in_part
    assert Vote.objects.filter(user_id=KEY, value__gte=200).count() == 0


def test_a_table_without_a_model_is_refused_while_a_key_switches(moving: HandMove) -> None:
    moving.announce()
    moving.publish()
    keys = runtime.placement_lease().renew().moves.in_flight  # type: ignore[union-attr]
    with pytest.raises(UnknownKeyOfRows, match=r"'no_model'.*'9001'.*run it again"):
        RowsOfKeys("photos", keys).condition("no_model", "no_model")


def test_keys_of_another_type_are_no_rows_of_a_table(moving: HandMove) -> None:
    moving.announce()
    KeyMove.objects.filter(pk=moving.move.pk).update(key="ada", value="ada")
    keys = runtime.placement_lease().renew().moves.in_flight  # type: ignore[union-attr]
    table = Photo._meta.db_table
    assert RowsOfKeys("photos", keys).condition(table, table) is None


def test_text_keys_are_told_apart_exactly(moving: HandMove) -> None:
    """The directory stores a digest of the key. The key of a letter is a foreign key."""
    strategy: Any = runtime.strategy("photos")
    strategy.store.place(
        "photos", {strategy.entry(name): SOURCE for name in ("Ada", "ada", "Ada ")}
    )
    for name in ("Ada", "ada", "Ada "):
        handle = Handle.objects.create(name=name)
        Letter.objects.create(handle=handle)
    key = KeyInFlight("photos", strategy.entry("Ada"), "Ada", 1, TARGET, SOURCE, "switching")
    shard, hidden = runtime.shard("photos", SOURCE), RowsOfKeys("photos", [key])
    for model, name in ((Handle, "name"), (Letter, "handle_id")):
        rows = model.objects.scatter()
        visible = rows._for_target(Target(shard, rows.query, hidden))
        assert sorted(visible.values_list(name, flat=True)) == ["Ada ", "ada"]
        merged = scatter.fetch(rows, [Target(shard, rows.query, hidden)])
        assert sorted(getattr(row, name) for row in merged) == ["Ada ", "ada"]
