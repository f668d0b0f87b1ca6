"""Every kind of write, and the guards that it marks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.core import serializers
from django.core.management import call_command
from django.db import connections, transaction
from django.db.migrations.executor import MigrationExecutor
from django.db.models import Count, F, IntegerField, Q
from django.test.utils import CaptureQueriesContext

from sharded_orm.cache.keys import Scope
from sharded_orm.models.cached.cached_model import cached_model
from tests.cached.models import (
    CachedAlbum,
    CachedBoard,
    CachedCafe,
    CachedComment,
    CachedCountry,
    CachedNote,
    CachedPhoto,
    CachedPlace,
    CachedPost,
    CachedTag,
    PlainRow,
)
from tests.queries.conftest import DATABASES

from .conftest import NEAR, ONE, SHARD, TWO, make
from .recording import Recorded

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql", "postgresql"),
    pytest.mark.django_db(transaction=True, databases=DATABASES),
]


def scope(model: Any, key: Any = None, isolate: Any = None, place: str | None = None) -> Scope:
    found = cached_model(model)
    assert found is not None
    if place is None:
        place = SHARD[key] if found.type.sharded else found.type.name
    token = found.key_token(key) if key is not None else None
    return found.scope(place, token, found.isolate_token(isolate) if isolate is not None else None)


def own(*scopes: Scope) -> set[str]:
    return {one.guards[-1] for one in scopes}


def objects(model: Any, key: Any, *pks: Any) -> set[str]:
    found = cached_model(model)
    assert found is not None
    return {scope(model, key).object_name(str(found.pk_token(pk))) for pk in pks}


@pytest.fixture
def album(local: Recorded) -> CachedAlbum:
    album = CachedAlbum.objects.create(user_id=ONE, title="a")
    local.clear()
    return album


def test_new_row(recorded: Recorded) -> None:
    tag = CachedTag(user_id=ONE, name="sea")
    tag.save()
    assert recorded.what == ["mark", "finish"]
    assert recorded.named("mark") == own(scope(CachedTag, ONE))
    # A new row had no object.
    assert recorded.named("finish") == own(scope(CachedTag, ONE))
    guard = recorded.guard(scope(CachedTag, ONE))
    assert guard is not None
    assert guard.open == ()


def test_changed_row_costs_two_round_trips_and_no_query(
    recorded: Recorded, django_assert_num_queries: Any
) -> None:
    tag = CachedTag.objects.create(user_id=ONE, name="sea")
    recorded.clear()
    tag.name = "see"
    with django_assert_num_queries(3, connection=connections["photos"]):  # BEGIN and COMMIT
        tag.save(force_update=True)
    assert [server.round_trips for server in recorded.servers] == [2]
    assert recorded.named("finish") == own(scope(CachedTag, ONE)) | objects(CachedTag, ONE, tag.pk)


def test_new_row_with_isolate_key(album: CachedAlbum, local: Recorded) -> None:
    CachedPhoto.objects.create(user_id=ONE, album=album, title="p")
    assert local.named("mark") == own(scope(CachedPhoto, ONE), scope(CachedPhoto, ONE, album.pk))


def test_moved_to_another_isolate_key(album: CachedAlbum, local: Recorded) -> None:
    other = CachedAlbum.objects.create(user_id=ONE, title="b")
    photo = CachedPhoto.objects.create(user_id=ONE, album=album, title="p")
    local.clear()
    photo.album = other
    photo.save()
    assert local.what == ["mark", "finish"]
    assert local.named("mark") == own(
        scope(CachedPhoto, ONE),
        scope(CachedPhoto, ONE, album.pk),
        scope(CachedPhoto, ONE, other.pk),
    )


def test_what_the_program_thinks_of_the_isolate_key_does_not_matter(
    album: CachedAlbum, local: Recorded
) -> None:
    photo = CachedPhoto.objects.create(user_id=ONE, album=album, title="p")
    stale = CachedPhoto.objects.get(user_id=ONE, pk=photo.pk)
    other = CachedAlbum.objects.create(user_id=ONE, title="b")
    photo.album = other
    photo.save()
    local.clear()
    stale.title = "q"
    stale.save(update_fields=["title"])
    assert local.named("mark") == own(scope(CachedPhoto, ONE), scope(CachedPhoto, ONE, other.pk))


def statements(captured: Any) -> list[str]:
    return [query["sql"].split()[0] for query in captured]


def test_isolate_key_costs_no_query_while_it_stays(album: CachedAlbum, local: Recorded) -> None:
    photo = CachedPhoto.objects.create(user_id=ONE, album=album, title="p")
    loose = CachedPhoto.objects.create(user_id=ONE, title="in no album")
    for row in (photo, loose):
        guard_names = own(scope(CachedPhoto, ONE), home_of(row))
        for fields in (None, ["title"]):
            row.title += "!"
            local.clear()
            with CaptureQueriesContext(connections["photos"]) as captured:
                row.save(update_fields=fields)
            assert statements(captured) == ["BEGIN", "UPDATE", "COMMIT"]
            assert local.named("mark") == guard_names
    local.clear()
    CachedComment.objects.create(user_id=ONE, photo=photo, text="c").delete()
    assert local.named("mark") == own(
        scope(CachedComment, ONE), scope(CachedComment, ONE, photo.pk)
    )


def test_the_same_of_a_global_model(local: Recorded) -> None:
    post = CachedPost.objects.create(topic=1, title="t")
    for fields in (None, ["title"]):
        local.clear()
        with CaptureQueriesContext(connections["default"]) as captured:
            post.save(update_fields=fields)
        assert statements(captured) == ["BEGIN", "UPDATE", "COMMIT"]
        assert local.named("mark") == own(scope(CachedPost), scope(CachedPost, isolate=1))
    with CaptureQueriesContext(connections["default"]) as captured:
        post.delete()
    assert statements(captured) == ["BEGIN", "DELETE", "COMMIT"]


def home_of(photo: CachedPhoto) -> Scope:
    found = cached_model(CachedPhoto)
    assert found is not None
    return found.scope(SHARD[ONE], found.key_token(ONE), found.isolate_token(photo.album_id))


def test_update_of_a_key(album: CachedAlbum, local: Recorded) -> None:
    photos = CachedPhoto.objects.bulk_create(
        [CachedPhoto(photo_id=n, user_id=ONE, album=album, title="p") for n in (1, 2)]
    )
    CachedPhoto.objects.create(photo_id=3, user_id=NEAR, title="other key")
    local.clear()
    assert CachedPhoto.objects.filter(user_id=ONE).update(stars=F("stars") + 1) == 2
    assert local.named("mark") == own(scope(CachedPhoto, ONE), scope(CachedPhoto, ONE, album.pk))
    assert objects(CachedPhoto, ONE, *[p.pk for p in photos]) <= local.named("finish")


def test_update_that_computes_the_isolate_key_is_wide(local: Recorded) -> None:
    CachedPost.objects.create(topic=1, title="t")
    local.clear()
    CachedPost.objects.filter(topic=1).update(topic=F("topic") + 1)
    assert local.named("mark") == own(scope(CachedPost))
    before = local.guard(scope(CachedPost))
    CachedPost.objects.filter(topic=2).update(topic=F("topic") + 1)
    after = local.guard(scope(CachedPost))
    assert before is not None
    assert after is not None
    assert before.generation != after.generation


def test_update_of_nothing_tells_nobody(album: CachedAlbum, local: Recorded) -> None:
    assert CachedPhoto.objects.filter(user_id=ONE, stars=99).update(stars=1) == 0
    assert local.what == []


def test_update_of_many_rows(album: CachedAlbum, local: Recorded) -> None:
    CachedTag.objects.bulk_create([CachedTag(user_id=ONE, name=str(n)) for n in range(101)])
    before = local.guard(scope(CachedTag, ONE))
    local.clear()
    assert CachedTag.objects.filter(user_id=ONE).update(uses=1) == 101
    # All objects of the key are invalid, and none is named.
    assert local.named("finish") == own(scope(CachedTag, ONE))
    after = local.guard(scope(CachedTag, ONE))
    assert before is not None
    assert after is not None
    assert before.generation != after.generation


def test_update_of_several_keys(local: Recorded) -> None:
    for key in (ONE, NEAR, TWO):
        CachedTag.objects.create(user_id=key, name="sea")
    local.clear()
    assert CachedTag.objects.filter(user_id__in=[ONE, NEAR, TWO]).update(uses=1) == 3
    assert local.named("mark") == own(*(scope(CachedTag, key) for key in (ONE, NEAR, TWO)))


def test_update_of_a_shard_by_what_is_no_key(local: Recorded) -> None:
    tags = [CachedTag.objects.create(user_id=key, name="sea") for key in (ONE, NEAR)]
    local.clear()
    assert CachedTag.objects.using(SHARD[ONE]).filter(name="sea").update(uses=1) == 2
    assert local.named("mark") == own(scope(CachedTag, ONE), scope(CachedTag, NEAR))
    assert objects(CachedTag, ONE, tags[0].pk) <= local.named("finish")


def test_update_of_a_whole_shard(local: Recorded) -> None:
    CachedTag.objects.bulk_create([CachedTag(user_id=ONE, name=str(n)) for n in range(101)])
    local.clear()
    assert CachedTag.objects.using(SHARD[ONE]).update(uses=1) == 101
    assert local.named("mark") == own(scope(CachedTag, place=SHARD[ONE]))


def test_update_through_a_join(album: CachedAlbum, local: Recorded) -> None:
    photo = CachedPhoto.objects.create(user_id=ONE, album=album, title="p")
    other = CachedAlbum.objects.create(user_id=ONE, title="b")
    CachedPhoto.objects.create(user_id=ONE, album=other, title="p")
    local.clear()
    found = CachedPhoto.objects.filter(user_id=ONE, album__title="a")
    assert found.update(title="q") == 1
    assert local.named("mark") == own(scope(CachedPhoto, ONE), scope(CachedPhoto, ONE, album.pk))
    assert objects(CachedPhoto, ONE, photo.pk) <= local.named("finish")


def test_bulk_update(local: Recorded) -> None:
    tags = [CachedTag.objects.create(user_id=ONE, name=str(n)) for n in range(3)]
    local.clear()
    for tag in tags:
        tag.uses = 7
    CachedTag.objects.bulk_update(tags, ["uses"])
    assert local.what == ["mark", "finish"]
    assert objects(CachedTag, ONE, *[t.pk for t in tags]) <= local.named("finish")


def test_delete_of_a_row(recorded: Recorded) -> None:
    tag = CachedTag.objects.create(user_id=ONE, name="sea")
    pk = tag.pk
    recorded.clear()
    tag.delete()
    assert recorded.what == ["mark", "finish"]
    assert recorded.named("mark") == own(scope(CachedTag, ONE))
    assert objects(CachedTag, ONE, pk) <= recorded.named("finish")


def test_delete_of_a_row_costs_no_query_for_its_key(
    local: Recorded, django_assert_num_queries: Any
) -> None:
    tag = CachedTag(user_id=ONE, name="sea")
    tag.save()
    photos = tag.photos.through.objects.using(SHARD[ONE])
    assert not photos.exists()
    with django_assert_num_queries(4, connection=connections["photos"]) as captured:
        tag.delete()
    assert [query["sql"].split()[0] for query in captured.captured_queries] == [
        "BEGIN", "DELETE", "DELETE", "COMMIT",
    ]  # fmt: skip


def test_delete_of_a_row_whose_key_was_changed_in_memory(local: Recorded) -> None:
    tag = CachedTag.objects.create(user_id=ONE, name="sea")
    pk = tag.pk
    local.clear()
    tag.user_id = NEAR  # on the same shard
    tag.delete()
    assert not CachedTag.objects.filter(user_id=ONE).exists()
    assert local.named("mark") == own(scope(CachedTag, ONE))
    assert objects(CachedTag, ONE, pk) <= local.named("finish")


def test_delete_by_query(local: Recorded) -> None:
    tags = [CachedTag.objects.create(user_id=ONE, name=str(n)) for n in range(3)]
    local.clear()
    CachedTag.objects.filter(user_id=ONE, name__in=["0", "1"]).delete()
    assert objects(CachedTag, ONE, tags[0].pk, tags[1].pk) <= local.named("finish")
    assert not objects(CachedTag, ONE, tags[2].pk) & local.named("finish")


def test_cascade_set_null_and_fast_deletes(album: CachedAlbum, local: Recorded) -> None:
    photo = CachedPhoto.objects.create(user_id=ONE, album=album, title="p")
    comment = CachedComment.objects.create(user_id=ONE, photo=photo, text="c")
    PlainRow.objects.create(user_id=ONE, photo=photo, text="not cached")
    covered = CachedAlbum.objects.create(user_id=ONE, title="b", cover=photo)
    pk = photo.pk
    comment_pk = comment.pk
    local.clear()
    photo.delete()
    assert local.what == ["mark", "finish"]
    assert local.named("mark") == own(
        scope(CachedPhoto, ONE),
        scope(CachedPhoto, ONE, album.pk),
        scope(CachedComment, ONE),
        scope(CachedComment, ONE, pk),
        scope(CachedAlbum, ONE),
    )
    assert local.named("finish") - local.named("mark") == (
        objects(CachedPhoto, ONE, pk)
        | objects(CachedComment, ONE, comment_pk)
        | objects(CachedAlbum, ONE, covered.pk)
    )


def test_related_manager(album: CachedAlbum, local: Recorded) -> None:
    photo = CachedPhoto.objects.create(user_id=ONE, title="p")
    local.clear()
    album.photos.add(photo)
    assert scope(CachedPhoto, ONE, album.pk).guards[-1] in local.named("mark")
    assert objects(CachedPhoto, ONE, photo.pk) <= local.named("finish")


def test_bulk_create(local: Recorded) -> None:
    rows = [CachedPost(topic=n % 2, title=str(n)) for n in range(4)]
    CachedPost.objects.bulk_create(rows)
    assert local.named("mark") == own(
        scope(CachedPost), scope(CachedPost, isolate=0), scope(CachedPost, isolate=1)
    )


class Secretive(IntegerField):  # type: ignore[type-arg]  # of Django's stubs
    """Stores another value than its row has."""

    def pre_save(self, model_instance: Any, add: bool) -> Any:
        return getattr(model_instance, self.attname) + 1


def test_isolate_key_that_its_field_makes(local: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CachedPost._meta.get_field("topic"), "__class__", Secretive)
    before = CachedPost.objects.create(topic=1, title="t")
    guard = local.guard(scope(CachedPost))
    local.clear()
    CachedPost.objects.create(topic=1, title="t")
    after = local.guard(scope(CachedPost))
    assert CachedPost.objects.uncached().get(pk=before.pk).topic == 2
    # Lists of all topics are invalid.
    assert local.named("mark") == own(scope(CachedPost))
    assert guard is not None
    assert after is not None
    assert after.generation != guard.generation


def upsert(model: Any, row: Any, unique: list[str], update: list[str]) -> None:
    # MySQL checks all unique constraints, the others only the named ones.
    named = {} if connections["default"].vendor == "mysql" else {"unique_fields": unique}
    model.objects.bulk_create([row], update_conflicts=True, update_fields=update, **named)


def test_upsert_of_a_global_model(local: Recorded) -> None:
    CachedCountry.objects.create(name="A", people=1)
    before = local.guard(scope(CachedCountry))
    upsert(CachedCountry, CachedCountry(name="A", people=2), ["name"], ["people"])
    assert CachedCountry.objects.get().people == 2
    after = local.guard(scope(CachedCountry))
    # It is not known which row it was.
    assert before is not None
    assert after is not None
    assert before.generation != after.generation


def test_upsert_by_what_is_unique_within_a_key(local: Recorded) -> None:
    CachedTag.objects.create(user_id=ONE, name="sea")
    local.clear()
    upsert(CachedTag, CachedTag(user_id=ONE, name="sea", uses=2), ["user_id", "name"], ["uses"])
    assert CachedTag.objects.get(user_id=ONE).uses == 2
    assert local.named("mark") == own(scope(CachedTag, ONE))


def test_upsert_of_a_row_that_may_have_another_key(local: Recorded) -> None:
    tag = CachedTag.objects.create(user_id=NEAR, name="sea")
    local.clear()
    upsert(CachedTag, CachedTag(pk=tag.pk, user_id=ONE, name="lake"), ["id"], ["name"])
    assert CachedTag.objects.get(user_id=NEAR).name == "lake"
    assert local.named("mark") == own(scope(CachedTag, place=SHARD[ONE]))


def test_key_that_the_insert_makes(local: Recorded) -> None:
    board = CachedBoard.objects.create(name="b")
    (name,) = local.named("mark")
    assert name == scope(CachedBoard, board.pk, place=board._state.db).guards[-1]


def test_get_or_create_and_update_or_create(local: Recorded) -> None:
    tag, made = CachedTag.objects.get_or_create(user_id=ONE, name="sea")
    assert made
    local.clear()
    CachedTag.objects.update_or_create(user_id=ONE, name="sea", defaults={"uses": 2})
    assert local.what == ["mark", "finish"]
    assert objects(CachedTag, ONE, tag.pk) <= local.named("finish")


def test_uncached_models_cost_nothing(local: Recorded, django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(1, connection=connections["photos"]) as captured:
        row = PlainRow.objects.create(user_id=ONE, text="t")
    assert not any("BEGIN" in query["sql"] for query in captured.captured_queries)
    row.delete()
    assert local.what == []


def test_several_writes_are_told_together(recorded: Recorded) -> None:
    with transaction.atomic(using=SHARD[ONE]):
        for name in ("a", "b", "c"):
            CachedTag.objects.create(user_id=ONE, name=name)
        CachedTag.objects.create(user_id=NEAR, name="d")
        assert recorded.what == []
    assert recorded.what == ["mark", "finish"]
    assert recorded.named("mark") == own(scope(CachedTag, ONE), scope(CachedTag, NEAR))


def test_rolled_back_tells_nobody(recorded: Recorded) -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic(using=SHARD[ONE]):
        CachedTag.objects.create(user_id=ONE, name="a")
        raise ZeroDivisionError
    assert recorded.what == []


def test_condition_on_an_aggregate(album: CachedAlbum, local: Recorded) -> None:
    photos = [CachedPhoto.objects.create(user_id=ONE, album=album, title="p") for _ in range(2)]
    CachedComment.objects.create(user_id=ONE, photo=photos[0], text="c")
    quiet = CachedPhoto.objects.filter(user_id=ONE).annotate(n=Count("comments")).filter(n=0)
    local.clear()
    assert quiet.update(stars=3) == 1
    assert objects(CachedPhoto, ONE, photos[1].pk) <= local.named("finish")
    assert not objects(CachedPhoto, ONE, photos[0].pk) & local.named("finish")
    local.clear()
    quiet.delete()
    assert objects(CachedPhoto, ONE, photos[1].pk) <= local.named("finish")


def test_condition_on_a_subquery(album: CachedAlbum, local: Recorded) -> None:
    photo = CachedPhoto.objects.create(user_id=ONE, album=album, title="p")
    albums = CachedAlbum.objects.filter(user_id=ONE, title="a").values("pk")
    local.clear()
    assert CachedPhoto.objects.filter(user_id=ONE, album__in=albums).update(stars=3) == 1
    assert objects(CachedPhoto, ONE, photo.pk) <= local.named("finish")


def test_alternatives(local: Recorded) -> None:
    tags = [CachedTag.objects.create(user_id=key, name="sea") for key in (ONE, NEAR)]
    local.clear()
    either = Q(user_id=ONE, name="sea") | Q(user_id=NEAR)
    assert CachedTag.objects.filter(either).update(uses=1) == 2
    assert local.named("finish") >= objects(CachedTag, ONE, tags[0].pk)
    assert local.named("finish") >= objects(CachedTag, NEAR, tags[1].pk)


def test_text_keys(local: Recorded) -> None:
    found = cached_model(CachedNote)
    assert found is not None
    note = CachedNote.objects.create(slug="Größe 1-2", account="A b", folder="f-1", text="x")
    place = str(note._state.db)
    home = found.scope(place, found.key_token("A b"))
    folder = found.scope(place, found.key_token("A b"), found.isolate_token("f-1"))
    assert local.named("mark") == own(home, folder)
    local.clear()
    note.text = "y"
    note.save()
    assert local.named("mark") == own(home, folder)
    assert home.object_name(str(found.pk_token("Größe 1-2"))) in local.named("finish")


def test_parent_in_another_table(local: Recorded) -> None:
    cafe = CachedCafe.objects.create(name="C", chairs=3)
    assert local.named("mark") == own(scope(CachedPlace))
    local.clear()
    cafe.name = "D"
    cafe.save()
    assert objects(CachedPlace, None, cafe.pk) <= local.named("finish")
    local.clear()
    CachedCafe.objects.filter(chairs=3).update(name="E", chairs=4)
    assert objects(CachedPlace, None, cafe.pk) <= local.named("finish")
    pk = cafe.pk
    local.clear()
    cafe.delete()
    assert objects(CachedPlace, None, pk) <= local.named("finish")


def test_fixtures(local: Recorded) -> None:
    country = CachedCountry(pk=7, name="A")
    text = serializers.serialize("json", [country])
    for row in serializers.deserialize("json", text):
        row.save()
    assert local.named("mark") == own(scope(CachedCountry))


@pytest.mark.parametrize("database", [None, "photos", SHARD[ONE]])
def test_loaddata(local: Recorded, tmp_path: Path, database: str | None) -> None:
    tag = CachedTag.objects.create(user_id=ONE, name="before")
    album = CachedAlbum.objects.create(user_id=ONE, title="before")
    rows = serializers.serialize("json", [tag, album])
    fixture = tmp_path / "tags.json"
    fixture.write_text(rows.replace("before", "after"))
    local.clear()
    call_command("loaddata", fixture, database=database, verbosity=0)
    assert objects(CachedTag, ONE, tag.pk) | objects(CachedAlbum, ONE, album.pk) <= local.named(
        "finish"
    )
    assert CachedTag.objects.get(user_id=ONE).name == "after"


def test_model_of_a_migration(local: Recorded) -> None:
    country = CachedCountry.objects.create(name="A")
    tag = CachedTag.objects.create(user_id=ONE, name="sea")
    executor = MigrationExecutor(connections["default"])
    state = executor.loader.project_state(("cached", "0001_initial"))
    local.clear()
    state.apps.get_model("cached", "CachedCountry").objects.update(people=5)
    assert objects(CachedCountry, None, country.pk) <= local.named("finish")
    old = state.apps.get_model("cached", "CachedTag")
    old._default_manager.using(SHARD[ONE]).filter(uses=0).update(uses=1)
    assert objects(CachedTag, ONE, tag.pk) <= local.named("finish")


def test_many_to_many_of_uncached_rows(local: Recorded) -> None:
    photo = CachedPhoto.objects.create(user_id=ONE, title="p")
    tag = CachedTag.objects.create(user_id=ONE, name="sea")
    local.clear()
    photo.tags.add(tag)
    photo.tags.clear()
    assert local.what == []


def test_objects_and_lists_on_two_servers(
    album: CachedAlbum, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = "django.core.cache.backends.locmem.LocMemCache"
    caches = {name: {"BACKEND": backend, "LOCATION": name} for name in ("objects", "lists")}
    options = {"objects": "objects", "lists": "lists"}
    for recorded in make({**caches, "default": caches["objects"]}, monkeypatch, **options):
        photo = CachedPhoto.objects.create(user_id=ONE, album=album, title="p")
        recorded.clear()
        photo.save()
        home, narrow = scope(CachedPhoto, ONE), scope(CachedPhoto, ONE, album.pk)
        names_by_call = {(what, server): set(names) for what, server, names in recorded.events}
        of_objects = recorded.cache.objects(SHARD[ONE]).name
        of_lists = recorded.cache.lists(SHARD[ONE]).name
        assert names_by_call == {
            ("mark", of_objects): own(home),
            ("mark", of_lists): own(home, narrow),
            ("finish", of_objects): own(home) | objects(CachedPhoto, ONE, photo.pk),
            ("finish", of_lists): own(home, narrow),
        }
        assert [server.round_trips for server in recorded.servers] == [2, 2]


def test_sqlite_waits_for_other_writers_from_the_start(
    local: Recorded, django_assert_num_queries: Any
) -> None:
    if connections["photos"].vendor != "sqlite":
        pytest.skip("of SQLite")
    with CaptureQueriesContext(connections["photos"]) as captured:
        CachedTag.objects.create(user_id=ONE, name="sea")
        with transaction.atomic(using=SHARD[ONE]):
            CachedTag.objects.create(user_id=ONE, name="lake")
    begun = [query["sql"] for query in captured if query["sql"].startswith("BEGIN")]
    assert begun == ["BEGIN IMMEDIATE", "BEGIN"]
