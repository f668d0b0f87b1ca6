"""Writes of a process that is paused while a key moves end on the new shard, each exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import OperationalError, models
from django.db.models import F
from django.test.utils import isolate_apps

import sharded_orm
from sharded_orm import runtime
from sharded_orm.backends.write_hooks import route_check
from sharded_orm.exceptions import KeyMoved
from sharded_orm.models.moves import repetition
from sharded_orm.operations.runs import journal
from sharded_orm.routing.placement_uses import PlacementUses, current_uses, recorded_uses
from tests.photos.models import Album, Comment, Photo, Tag
from tests.queries.conftest import DATABASES
from tests.queries.moves.conftest import KEY
from tests.queries.moves.hand_move import (
    SOURCE,
    TARGET,
    HandMove,
    alias,
    before_statement,
    close_fence,
    elsewhere,
    open_fence,
)

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]

LINKS = Photo.tags.through._meta.db_table
FENCED = (*(model._meta.db_table for model in (Photo, Album, Comment, Tag)), LINKS)
# A key that stays, with a photo on a shard that is written before SOURCE.
OTHER = KEY + 5


@pytest.fixture
def move(move: HandMove) -> Iterator[HandMove]:
    """The move of the key, after which the fence of SOURCE stays closed."""
    strategy: Any = runtime.strategy("photos")
    strategy.store.place("photos", {str(OTHER): 1})
    Photo.objects.create(user_id=OTHER, title="o", stars=1)
    tag = Tag.objects.create(user_id=KEY, name="t")
    Photo.objects.get(user_id=KEY).tags.add(tag)
    Tag.objects.create(user_id=KEY, name="unused")
    move.tables |= {Tag._meta.db_table: "user_id"}
    of_key = f"SELECT photo_id FROM {Photo._meta.db_table} WHERE user_id = %s"
    move.links = {LINKS: f"photo_id IN ({of_key})"}
    yield move
    for table in FENCED:
        open_fence(SOURCE, table)


def fenced(move: HandMove) -> Callable[[], None]:
    def run() -> None:
        with recorded_uses(PlacementUses()):
            move.whole()
            for table in FENCED:
                close_fence(SOURCE, table)

    return elsewhere(run)


@contextmanager
def paused_around_check(run: Callable[[], None], *, after: bool) -> Iterator[None]:
    """Within the block, call ``run`` at the first check of the route of a write."""
    check, calls = repetition.refuse_former_route, []

    def paused() -> None:
        if calls or current_uses() is None:
            check()
            return
        calls.append(1)
        if after:
            check()
        run()
        if not after:
            check()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(route_check, "_check", paused)
        yield
    assert calls


PAUSES: dict[str, Callable[[Callable[[], None]], AbstractContextManager[None]]] = {
    "before its first statement": lambda run: before_statement(SOURCE, run),
    "before its check": lambda run: paused_around_check(run, after=False),
    "after its check": lambda run: paused_around_check(run, after=True),
}
# On SQLite the long runs have the pause between the two others, which servers have each time.
every_pause = pytest.mark.parametrize(
    "pause",
    [
        pytest.param(name, marks=[pytest.mark.long_on("sqlite")] * (name == "before its check"))
        for name in PAUSES
    ],
)


@async_to_sync
async def _async(method: Any, *args: Any, **kwargs: Any) -> Any:
    return await method(*args, **kwargs)


def photo() -> Any:
    return Photo.objects.get(user_id=KEY)


def _bulk_update(row: Any) -> int:
    row.stars = 9
    return Photo.objects.bulk_update([row], ["stars"])


def _save(row: Any, **kwargs: Any) -> None:
    row.stars = 9
    row.save(**kwargs)


def _bulk_create(**kwargs: Any) -> list[Photo]:
    rows = [Photo(user_id=KEY, title="new"), Photo(user_id=OTHER, title="new of other")]
    return Photo.objects.bulk_create(rows, **kwargs)


def _upsert(row: Any) -> None:
    row.stars = 9
    Photo.objects.bulk_create([row], update_conflicts=True, update_fields=["stars"])


# The operation, its result, and what the target has afterwards: titles and stars of photos.
P, NEW = ("p", 1), ("new", None)
WRITES: dict[str, tuple[Callable[[Any], Any], Any, list[Any]]] = {
    "save": (_save, None, [("p", 9)]),
    "save some fields": (lambda row: _save(row, update_fields=["stars"]), None, [("p", 9)]),
    "force_update": (lambda row: _save(row, force_update=True), None, [("p", 9)]),
    "delete a row": (lambda row: row.delete()[0], 3, []),
    "update": (
        lambda row: Photo.objects.filter(user_id=KEY).update(stars=F("stars") + 8),
        1,
        [("p", 9)],
    ),
    "delete": (lambda row: Photo.objects.filter(user_id=KEY).delete()[0], 3, []),
    "bulk_create": (lambda row: len(_bulk_create()), 2, [NEW, P]),
    "bulk_create, batches": (lambda row: len(_bulk_create(batch_size=1)), 2, [NEW, P]),
    "ignore_conflicts": (lambda row: len(_bulk_create(ignore_conflicts=True)), 2, [NEW, P]),
    "abulk_create": (
        lambda row: len(_async(Photo.objects.abulk_create, [Photo(user_id=KEY, title="new")])),
        1,
        [NEW, P],
    ),
    "bulk_update": (_bulk_update, 1, [("p", 9)]),
    "get_or_create": (
        lambda row: Photo.objects.get_or_create(user_id=KEY, title="new")[1],
        True,
        [NEW, P],
    ),
    "aget_or_create": (
        lambda row: _async(Photo.objects.aget_or_create, user_id=KEY, title="new")[1],
        True,
        [NEW, P],
    ),
    "update_or_create, created": (
        lambda row: Photo.objects.update_or_create({"stars": 2}, user_id=KEY, title="new")[1],
        True,
        [("new", 2), P],
    ),
    "update_or_create, updated": (
        lambda row: Photo.objects.update_or_create(
            {"stars": F("stars") + 8}, user_id=KEY, title="p"
        )[1],
        False,
        [("p", 9)],
    ),
    "related create": (
        lambda row: row.album.photos.create(user_id=KEY, title="new").title,
        "new",
        [NEW, P],
    ),
    "related update": (lambda row: row.album.photos.update(stars=9), 1, [("p", 9)]),
    "related get_or_create": (
        lambda row: row.album.photos.get_or_create(title="new")[1],
        True,
        [NEW, P],
    ),
}
BY_ANOTHER_LOOK_UP = {"save some fields"}


@every_pause
@pytest.mark.parametrize("name", WRITES)
def test_a_write_of_a_paused_process_is_done_once_on_the_new_shard(
    move: HandMove, name: str, pause: str
) -> None:
    if name.startswith("update_or_create") and pause != "before its first statement":
        pytest.skip("Its transaction locks the row, so the old row is not taken away meanwhile.")
    write, result, stored = WRITES[name]
    row = Photo.objects.select_related("album").get(user_id=KEY)
    with PAUSES[pause](fenced(move)):
        assert write(row) == result
    assert not Photo.objects.using(alias(SOURCE)).exists()
    rows = Photo.objects.using(alias(TARGET)).values_list("title", "stars")
    assert sorted(rows, key=str) == stored
    others = sorted(Photo.objects.filter(user_id=OTHER).values_list("title", flat=True))
    assert others == (
        ["new of other", "o"]
        if name == "bulk_create" or name in ("bulk_create, batches", "ignore_conflicts")
        else ["o"]
    )


LINK_WRITES: dict[str, tuple[Callable[[Any, Any], Any], list[str]]] = {
    "add": (lambda row, tag: row.tags.add(tag), ["t", "unused"]),
    "remove": (lambda row, tag: row.tags.remove(*row.tags.all()), []),
    "set": (lambda row, tag: row.tags.set([tag]), ["unused"]),
    "set after a clear": (lambda row, tag: row.tags.set([tag], clear=True), ["unused"]),
    "clear": (lambda row, tag: row.tags.clear(), []),
    "create": (lambda row, tag: row.tags.create(user_id=KEY, name="new"), ["new", "t"]),
    "the other side": (lambda row, tag: tag.photos.add(row), ["t", "unused"]),
}


@every_pause
@pytest.mark.parametrize("name", LINK_WRITES)
def test_links_of_a_paused_process_are_written_once_on_the_new_shard(
    move: HandMove, name: str, pause: str
) -> None:
    if name == "set" and pause != "before its first statement":
        pytest.skip("Its transaction holds locks, so nothing moves meanwhile.")
    write, stored = LINK_WRITES[name]
    row, tag = photo(), Tag.objects.get(user_id=KEY, name="unused")
    with PAUSES[pause](fenced(move)):
        write(row, tag)
    assert not Photo.tags.through.objects.using(alias(SOURCE)).exists()
    assert sorted(tag.name for tag in photo().tags.all()) == stored


@pytest.mark.parametrize("name", ["add", "set", "remove", "clear", "add one by one"])
def test_rows_of_a_foreign_key_are_related_once_on_the_new_shard(move: HandMove, name: str) -> None:
    if name == "set":
        pytest.skip("Its transaction holds locks, so nothing moves meanwhile.")
    album = Album.objects.get(owner_id=KEY)
    new = Photo.objects.create(user_id=KEY, title="new")
    old = Photo.objects.get(user_id=KEY, title="p")
    write: Callable[[], Any]
    write, stored = {
        "add": (lambda: album.photos.add(new), ["new", "p"]),
        "add one by one": (lambda: album.photos.add(new, bulk=False), ["new", "p"]),
        "set": (lambda: album.photos.set([new]), ["new"]),
        "remove": (lambda: album.photos.remove(old), []),
        "clear": (lambda: album.photos.clear(), []),
    }[name]
    with paused_around_check(fenced(move), after=True):
        write()
    assert sorted(row.title for row in album.photos.all()) == stored
    assert Photo.objects.using(alias(TARGET)).count() == 2


def test_rows_of_several_shards_are_created_in_part(
    move: HandMove, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The switch takes longer than MOVE_WAIT."""
    from dataclasses import replace

    config = replace(runtime.config(), move_wait=0.05)
    monkeypatch.setattr(runtime, "config", lambda: config)
    move.announce()
    close_fence(SOURCE, Photo._meta.db_table)
    rows = [Photo(user_id=KEY, title="new"), Photo(user_id=OTHER, title="new")]
    with pytest.raises(KeyMoved) as caught:
        Photo.objects.bulk_create(rows)
    assert caught.value.is_in_part
    assert "1 of 2 rows" in "".join(caught.value.__notes__)
    assert [row._state.adding for row in rows] == [True, False]
    assert Photo.objects.filter(user_id=OTHER, title="new").count() == 1
    rows[0].pk = None
    open_fence(SOURCE, Photo._meta.db_table)
    Photo.objects.bulk_create([row for row in rows if row._state.adding])
    assert Photo.objects.filter(user_id=KEY, title="new").count() == 1


@pytest.mark.parametrize("name", WRITES)
def test_inside_a_transaction_nothing_is_repeated(move: HandMove, name: str) -> None:
    write = WRITES[name][0]
    row = Photo.objects.select_related("album").get(user_id=KEY)
    with pytest.raises(KeyMoved):
        with sharded_orm.atomic(Photo, user_id=KEY):
            with before_statement(SOURCE, fenced(move)):
                write(row)
    rows = list(Photo.objects.filter(user_id=KEY).values_list("title", "stars"))
    assert rows == [("p", 1)]


@pytest.mark.parametrize("moves", [True, False])
def test_a_deadlock_with_a_mover_whose_move_is_over_when_the_error_arrives(
    move: HandMove, moves: bool
) -> None:
    """The server has undone the write, and nobody is told what the other transaction was."""

    def end_by_deadlock() -> None:
        if moves:
            elsewhere(move.whole)()
        raise OperationalError(1213, "Deadlock found when trying to get lock")

    photos = Photo.objects.filter(user_id=KEY)
    with before_statement(SOURCE, end_by_deadlock):
        if moves:
            assert photos.update(stars=F("stars") + 1) == 1
        else:
            with pytest.raises(OperationalError, match="Deadlock"):
                photos.update(stars=F("stars") + 1)
    assert Photo.objects.get(user_id=KEY).stars == 1 + moves


@pytest.mark.parametrize("kind", ["move shards", "move keys", "grow"])
@pytest.mark.parametrize("has_ended", [False, True])
def test_a_deadlock_while_shards_or_other_keys_move(
    move: HandMove, kind: str, has_ended: bool
) -> None:
    """It may be one with the mover, also if the run ends before the process learns of the deadlock."""
    run = ExitStack()
    run.enter_context(journal.hold_run(kind, "photos", {}))

    def end_by_deadlock() -> None:
        if has_ended:
            elsewhere(run.close)()
        raise OperationalError(1213, "Deadlock found when trying to get lock")

    moves = kind != "grow"
    with run, ExitStack() as stack:
        if not moves:
            stack.enter_context(pytest.raises(OperationalError, match="Deadlock"))
        stack.enter_context(before_statement(SOURCE, end_by_deadlock))
        assert Photo.objects.filter(user_id=KEY).update(stars=F("stars") + 1) == 1
    assert Photo.objects.get(user_id=KEY).stars == 1 + moves


@pytest.mark.parametrize("result", [True, 1, [], "deleted"])
def test_a_delete_of_a_base_class_may_return_any_value_during_a_move(
    move: HandMove, result: Any
) -> None:
    """As in packages for soft deletion."""

    class SoftRow(models.Model):
        class Meta:
            abstract = True
            app_label = "photos_app"

        def delete(self, *args: Any, **kwargs: Any) -> Any:
            self.save()
            fenced(move)()
            return result

    with isolate_apps("tests.photos"):

        class SoftPhoto(Photo, SoftRow):
            class Meta:
                app_label = "photos_app"
                proxy = True

    row: Any = SoftPhoto.objects.get(user_id=KEY)
    assert row.delete() == result
