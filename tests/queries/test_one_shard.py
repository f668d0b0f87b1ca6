"""Every method of a queryset on one shard: the shard key is given, one statement is sent."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import DatabaseError, connections, models
from django.db.models import Avg, Count, Exists, F, Max, OuterRef, Q
from django.db.transaction import atomic
from django.test import TestCase
from django.test.utils import isolate_apps

from sharded_orm import runtime
from sharded_orm.exceptions import ShardKeyRequired, UnknownShard
from sharded_orm.models import ShardedModel
from tests.photos.models import Comment, Person, Photo
from tests.queries.conftest import DATABASES, NEAR, ONE, SHARD, START, TWO, UNPLACED

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

assert_queries = TestCase().assertNumQueries


def of(key: int) -> Any:
    return Photo.objects.filter(user_id=key)


def test_create_puts_the_row_on_the_shard_of_its_key(rows: list[Photo]) -> None:
    assert [row._state.db for row in rows] == [SHARD[row.user_id] for row in rows]
    assert Photo.objects.using("photos_00012").count() == 2
    assert Photo.objects.using("photos_00003").count() == 4


def test_create_costs_one_statement_on_the_shard(placed: None) -> None:
    with assert_queries(1, using="photos"):
        Photo.objects.create(user_id=ONE, title="x")


def test_a_global_row_is_no_hint_where_a_new_row_goes(placed: None) -> None:
    person = Person.objects.create(username="p")
    photo = Photo.objects.create(user_id=TWO, title="x")
    comment = Comment(author=person, photo=photo)
    comment.user_id = TWO
    comment.save()
    assert comment._state.db == SHARD[TWO]
    assert Comment.objects.get(user_id=TWO).author == person


def test_get_costs_one_statement_on_that_shard(rows: list[Photo]) -> None:
    with assert_queries(1, using="photos"), assert_queries(1, using="photos_00012"):
        row = Photo.objects.get(user_id=TWO, pk=rows[1].pk)
    assert (row, row._state.db) == (rows[1], "photos_00012")


@pytest.mark.parametrize(
    "condition",
    [
        Q(user_id=ONE),
        Q(user_id=ONE) & Q(stars__gte=0),
        Q(user_id=ONE) & ~Q(stars=17),
        Q(Q(user_id=ONE, title="p0") | Q(user_id=ONE, title="p3")),
        Q(user_id__in=[ONE]),
        Q(user_id__in=[ONE, TWO]) & Q(user_id=ONE),
    ],
)
def test_conditions_that_name_one_key(rows: list[Photo], condition: Q) -> None:
    with assert_queries(1, using="photos"):
        assert set(Photo.objects.filter(condition)) == {rows[0], rows[3]}


@pytest.mark.parametrize(
    "condition",
    [
        Q(),
        Q(title="p0"),
        ~Q(user_id=ONE),
        Q(user_id=ONE) | Q(title="p1"),
        Q(user_id=ONE) ^ Q(user_id=TWO),
        Q(user_id=F("stars")),
        Q(user_id__gt=0),
        Q(user_id__isnull=False),
    ],
)
def test_conditions_that_name_no_key_are_refused(rows: list[Photo], condition: Q) -> None:
    with assert_queries(0, using="photos"), pytest.raises(ShardKeyRequired, match="user_id"):
        list(Photo.objects.filter(condition))


@pytest.mark.parametrize("empty", [Q(user_id=None), Q(user_id__in=[]), Q(user_id__in=[None])])
def test_no_key_at_all_is_an_empty_result(rows: list[Photo], empty: Q) -> None:
    with assert_queries(0, using="photos"):
        assert list(Photo.objects.filter(empty)) == []


def test_key_zero_is_a_key_like_any_other(placed: None) -> None:
    row = Photo.objects.create(user_id=0, title="zero")
    assert Photo.objects.get(user_id=0) == row


def test_chaining_keeps_the_shard(rows: list[Photo]) -> None:
    found = of(ONE).exclude(title="p0").order_by("-pk").filter(stars__gt=0)
    assert [row.title for row in found] == ["p3"]


def test_an_unplaced_key_is_empty_and_stays_unplaced(rows: list[Photo]) -> None:
    with assert_queries(0, using="photos"):
        assert list(of(UNPLACED)) == []
        assert (of(UNPLACED).count(), of(UNPLACED).exists(), of(UNPLACED).first()) == (
            0,
            False,
            None,
        )
        assert of(UNPLACED).aggregate(Max("stars")) == {"stars__max": None}
        assert of(UNPLACED).update(stars=1) == 0
        assert of(UNPLACED).delete() == (0, {})
    with pytest.raises(Photo.DoesNotExist):
        Photo.objects.get(user_id=UNPLACED)
    assert of(UNPLACED).explain_routing().shards == ()


def test_reading_methods(rows: list[Photo]) -> None:
    own = of(ONE).order_by("posted_at")
    assert [row.title for row in own[:1]] == ["p0"]
    assert [row.title for row in own[1:5]] == ["p3"]
    assert own[1].title == "p3"
    assert own.count() == len(own) == 2
    assert own.exists()
    assert own.contains(rows[0])
    assert (own.first(), own.last()) == (rows[0], rows[3])
    assert (own.earliest("posted_at"), own.latest("posted_at")) == (rows[0], rows[3])
    assert own.aggregate(n=Count("pk"), top=Max("stars"), mean=Avg("stars")) == {
        "n": 2,
        "top": 3,
        "mean": 1.5,
    }
    assert own.annotate(more=F("stars") + 1).values_list("more", flat=True)[1] == 4
    assert list(own.values("title")) == [{"title": "p0"}, {"title": "p3"}]
    assert list(own.values_list("title", flat=True)) == ["p0", "p3"]
    assert list(own.order_by().values_list("user_id").distinct()) == [(ONE,)]
    assert own.in_bulk([rows[0].pk]) == {rows[0].pk: rows[0]}
    assert list(own.iterator()) == [rows[0], rows[3]]
    assert [d.minute for d in own.datetimes("posted_at", "minute")] == [0, 3]
    assert of(ONE).union(of(ONE).filter(stars=0)).count() == 2


def test_contains_refuses_a_row_that_is_not_stored_as_django_does(rows):
    for photos in (
        Photo.objects.filter(user_id=ONE),
        Photo.objects.using(SHARD[TWO]),
        Photo.objects.scatter()[1:2],
        Photo.objects.scatter(),
    ):
        with pytest.raises(ValueError, match="unsaved"):
            photos.contains(Photo(user_id=ONE))


def test_get_or_create(rows: list[Photo]) -> None:
    # The directory is queried once for its key.
    with assert_queries(1, using="directory"), assert_queries(1, using=SHARD[TWO]):
        found, created = Photo.objects.get_or_create(user_id=TWO, title="p1", defaults={"stars": 9})
    assert (found, created) == (rows[1], False)
    made, created = Photo.objects.get_or_create(user_id=TWO, title="new", defaults={"stars": 9})
    assert created
    assert made._state.db == "photos_00012"
    with pytest.raises(ShardKeyRequired):
        Photo.objects.get_or_create(title="p1", defaults={"user_id": TWO})


def test_update_or_create(rows: list[Photo]) -> None:
    found, created = Photo.objects.update_or_create(user_id=TWO, title="p1", defaults={"stars": 9})
    assert (found.pk, created) == (rows[1].pk, False)
    assert of(TWO).get(title="p1").stars == 9
    made, created = of(UNPLACED).update_or_create(
        user_id=UNPLACED, title="n", defaults={"stars": 1}
    )
    assert created
    assert of(UNPLACED).get() == made


def test_update_and_delete_stay_on_the_shard(rows: list[Photo]) -> None:
    with assert_queries(1, using="photos"):
        assert of(ONE).filter(stars=3).update(stars=F("stars") + 1) == 1
    assert of(ONE).filter(stars=4).delete()[0] == 1
    assert (of(ONE).count(), of(NEAR).count(), of(TWO).count()) == (1, 2, 2)


def test_deferred_fields_and_refresh(rows: list[Photo]) -> None:
    row = of(TWO).only("title").get(pk=rows[1].pk)
    with assert_queries(1, using="photos_00012"):
        assert row.stars == 1
    of(TWO).update(stars=7)
    with assert_queries(1, using="photos_00012"):
        row.refresh_from_db()
    assert row.stars == 7
    row.title = "changed"
    row.save()
    deferred = Photo.objects.filter(user_id=TWO).defer("user_id").get(pk=row.pk)
    deferred.title = "again"
    deferred.save(update_fields=["title"])
    assert of(TWO).filter(title="again").exists()


def test_pickling(rows: list[Photo]) -> None:
    assert pickle.loads(pickle.dumps(rows[1]))._state.db == "photos_00012"
    lazy = of(TWO).order_by("pk")
    restored = Photo.objects.all()
    restored.query = pickle.loads(pickle.dumps(lazy.query))
    assert list(restored) == list(lazy) == list(pickle.loads(pickle.dumps(lazy)))


def test_raw_and_explain(rows: list[Photo]) -> None:
    table = Photo._meta.db_table
    raw = of(TWO).raw(f"SELECT * FROM {table} WHERE title = %s", ["p1"])
    assert [row.pk for row in raw] == [rows[1].pk]
    with pytest.raises(ShardKeyRequired, match="raw") as refused:
        list(Photo.objects.raw(f"SELECT * FROM {table}"))
    assert "scatter" not in str(refused.value)
    assert of(TWO).explain()


def test_subqueries_inside_the_shard(rows: list[Photo]) -> None:
    Comment.objects.create(user_id=ONE, photo=rows[0], text="nice")
    commented = Exists(Comment.objects.filter(photo=OuterRef("pk")))
    assert of(ONE).filter(commented).get() == rows[0]
    photos = Comment.objects.filter(text="nice").values("photo")
    assert of(ONE).filter(pk__in=photos).get() == rows[0]
    assert [r.has for r in of(ONE).annotate(has=commented).order_by("posted_at")] == [True, False]


def test_explain_routing_tells_where_and_why(rows: list[Photo]) -> None:
    route = of(TWO).explain_routing()
    assert (route.shards, route.aliases, route.nodes[0][-1]) == ((12,), ("photos_00012",), "2")
    assert "Photo.user_id = 2" in str(route)
    assert "using" in Photo.objects.using("photos_00001").explain_routing().reason


def test_aexplain_routing_may_ask_the_directory(rows: list[Photo]) -> None:
    runtime.strategy("photos").forget(TWO)  # type: ignore[attr-defined]
    route = async_to_sync(of(TWO).aexplain_routing)()
    assert (route.aliases, str(route)) == (("photos_00012",), str(of(TWO).explain_routing()))
    with pytest.raises(ShardKeyRequired):
        async_to_sync(Photo.objects.all().aexplain_routing)()
    people = Person.objects.all()
    assert async_to_sync(people.aexplain_routing)() == people.explain_routing()


def test_an_error_of_the_database_names_the_shard_and_its_node(rows: list[Photo]) -> None:
    shard = runtime.shard("photos", 12)
    place = f"This was on shard {shard.alias!r}, node {shard.node!r}."
    with pytest.raises(DatabaseError) as caught, atomic(using=shard.alias):
        list(Photo.objects.using(shard.alias).raw("SELECT nonsense("))
    assert caught.value.__notes__ == [place]
    with pytest.raises(DatabaseError) as caught, atomic():
        list(Person.objects.raw("SELECT id FROM nothing"))
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize(
    "sql",
    ["SELECT photo_id FROM missing", "SELECT missing FROM {table}", "UPDATE {table} SET missing = 1",
     "INSERT INTO {table} (missing) VALUES (1)"],
)  # fmt: skip
def test_an_error_for_want_of_a_table_or_column_names_the_migrations(
    sql: str, rows: list[Photo]
) -> None:
    alias = runtime.shard("photos", 12).alias
    with (
        pytest.raises(DatabaseError) as caught,
        atomic(using=alias),
        connections[alias].cursor() as cursor,
    ):
        cursor.execute(sql.format(table=Photo._meta.db_table))
    _, remedy = caught.value.__notes__
    assert "manage.py shards status" in remedy
    assert "manage.py migrate_shards" in remedy
    assert "The rows of other models are in the global database" in remedy


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.django_db(databases=DATABASES, transaction=True)
def test_an_error_of_a_migration_does_not_name_the_migrations(
    placed: None, is_deferred: bool
) -> None:
    shard = runtime.shard("photos", 12)
    sql = "UPDATE missing SET photo_id = 1"
    # If a deferred statement fails, Django's schema editor leaves its transaction open.
    with (
        pytest.raises(DatabaseError) as caught,
        connections[shard.alias].schema_editor(atomic=False) as editor,
    ):
        if is_deferred:
            editor.deferred_sql.append(sql)
        else:
            editor.execute(sql)
    assert caught.value.__notes__ == [f"This was on shard {shard.alias!r}, node {shard.node!r}."]


def test_using_names_a_shard_and_wins(rows: list[Photo]) -> None:
    assert Photo.objects.using("photos_00012").order_by("posted_at").first() == rows[1]
    assert not Photo.objects.using("photos_00001").exists()


@async_to_sync
async def _async_twins() -> None:
    made = await Photo.objects.acreate(user_id=TWO, title="async", stars=1, posted_at=START)
    assert (await Photo.objects.aget(user_id=TWO, pk=made.pk)).title == "async"
    assert await of(TWO).acount() == 3
    assert {row.title async for row in of(TWO)} == {"p1", "p4", "async"}
    assert {row.title async for row in of(TWO).aiterator()} == {"p1", "p4", "async"}
    made.title = "saved"
    await made.asave()
    assert await of(TWO).filter(title="saved").aexists()
    await made.adelete()
    assert await of(TWO).aaggregate(n=Count("pk")) == {"n": 2}


def test_async_twins(rows: list[Photo]) -> None:
    _async_twins()


def test_posted_after(rows: list[Photo]) -> None:
    recent = of(ONE).filter(posted_at__gt=START + timedelta(minutes=1)).order_by("-posted_at")[:20]
    with assert_queries(1, using="photos"):
        assert [row.title for row in recent] == ["p3"]


def test_using_an_alias_outside_of_the_group_is_taken_at_its_word(rows: list[Photo]) -> None:
    route = Photo.objects.using("default").explain_routing()
    assert (route.shards, route.aliases) == ((), ("default",))
    assert "no shard of group 'photos'" in str(route)
    assert Photo.objects.using("photos").filter(user_id=TWO).count() == 2


def test_repr_never_fails_for_want_of_a_key(rows: list[Photo]) -> None:
    assert "not evaluated: Photo is sharded by 'user_id'" in repr(Photo.objects.all())
    assert "p1" in repr(of(TWO))


def test_a_shard_that_this_process_does_not_know(rows: list[Photo]) -> None:
    store = runtime.strategy("photos").store  # type: ignore[attr-defined]
    store.place("photos", {"900": 16})
    with pytest.raises(UnknownShard, match="older topology"):
        of(900).count()


@isolate_apps("tests.photos")
def test_a_column_of_the_childs_table_is_not_the_key_of_the_parents(placed: None) -> None:
    class Base(ShardedModel):
        owner = models.IntegerField()

        class Meta:
            app_label = "photos_app"

        class ShardMeta:
            group = "events"
            shard_key = "owner"

    class Child(Base):
        other = models.IntegerField(db_column="owner")

        class Meta:
            app_label = "photos_app"

    assert Child.objects.filter(owner=1).explain_routing().shards == (1,)
    with pytest.raises(ShardKeyRequired):
        Child.objects.filter(other=1).explain_routing()
