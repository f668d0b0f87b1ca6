"""The cache serves nothing of a former place of a key, not even after the key has come back."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connections

from sharded_orm import fetch_together, runtime
from sharded_orm.cache.reader import Reader
from tests.cached.models import CachedAlbum, CachedPhoto
from tests.queries.conftest import DATABASES, LATER, ONE, Clock, is_cached
from tests.queries.moves.hand_move import SOURCE, TARGET, HandMove, alias

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]

TABLES = {CachedAlbum._meta.db_table: "user_id", CachedPhoto._meta.db_table: "user_id"}


@pytest.fixture(autouse=True)
def lease(transactional_db: None) -> None:
    runtime.strategy("photos").forget()  # type: ignore[attr-defined]
    runtime.placement_lease()._poll = None


def titles() -> list[str]:
    return [photo.title for photo in CachedPhoto.objects.filter(user_id=ONE).order_by("pk")]


def title(pk: Any) -> str:
    return CachedPhoto.objects.get(user_id=ONE, pk=pk).title


def set_titles(shard: int, text: str) -> None:
    """Write without telling the cache server of this test.

    So it is with two servers: that of the other shard is told, and this one is not.
    """
    table = CachedPhoto._meta.db_table
    with connections[alias(shard)].cursor() as cursor:
        cursor.execute(f"UPDATE {table} SET title = %s WHERE user_id = %s", [text, ONE])


def test_a_moved_key_has_entries_of_its_own(photos: list[CachedPhoto]) -> None:
    pk = photos[0].pk
    assert is_cached(titles) and is_cached(lambda: title(pk))
    HandMove(ONE, TABLES).whole()
    set_titles(TARGET, "on the target")
    assert titles() == ["on the target"] * 5 and title(pk) == "on the target"
    HandMove(ONE, TABLES, TARGET, SOURCE).whole()
    set_titles(SOURCE, "back")
    assert titles() == ["back"] * 5 and title(pk) == "back"


def test_writes_after_a_move_make_the_new_entries_void(
    photos: list[CachedPhoto], clock: Clock
) -> None:
    pk = photos[0].pk
    HandMove(ONE, TABLES).whole()
    assert titles()[0] == title(pk) == "p0"
    clock.ahead += LATER
    titles()
    photos[0].title = "saved"
    photos[0].save()
    assert titles()[0] == title(pk) == "saved"
    CachedPhoto.objects.filter(user_id=ONE).update(title="updated")
    assert titles()[0] == title(pk) == "updated"
    CachedPhoto.objects.filter(user_id=ONE).delete()
    assert titles() == []


def test_a_cached_answer_is_confirmed_as_well(photos: list[CachedPhoto]) -> None:
    move = HandMove(ONE, TABLES)
    move.announce()
    assert is_cached(titles)
    move.switch()
    set_titles(TARGET, "on the target")
    assert titles() == ["on the target"] * 5


def test_answers_that_are_looked_up_together_are_confirmed_as_well(
    photos: list[CachedPhoto], monkeypatch: pytest.MonkeyPatch
) -> None:
    move = HandMove(ONE, TABLES)
    move.announce()
    assert is_cached(titles)
    read = Reader.read

    def switched(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        move.switch()
        set_titles(TARGET, "on the target")
        return read(*arguments, **options)

    monkeypatch.setattr(Reader, "read", switched)
    together = [CachedPhoto.objects.filter(user_id=ONE).order_by("pk")]
    fetch_together(*together)
    assert [photo.title for photo in together[0]] == ["on the target"] * 5


@pytest.mark.parametrize("step", ["publish", "switch_directory"])
def test_a_scattered_write_while_the_key_is_on_two_shards(
    photos: list[CachedPhoto], step: str
) -> None:
    titles()
    move = HandMove(ONE, TABLES)
    move.announce()
    move.publish()
    if step == "switch_directory":
        move.switch_directory()
    assert CachedPhoto.objects.scatter().update(title="updated") == 5
    assert titles() == ["updated"] * 5
    assert CachedPhoto.objects.scatter().filter(stars__lt=3).delete()[0] == 3
    assert titles() == ["updated"] * 2
    assert CachedPhoto.objects.scatter().count() == 2
