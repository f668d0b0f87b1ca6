"""Ids of milliseconds, shard and sequence: made by the process, unique by the insert."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core import serializers
from django.core.exceptions import ValidationError
from django.db import IntegrityError, NotSupportedError, connections, transaction
from django.db.migrations.writer import MigrationWriter
from django.db.models.sql import InsertQuery
from django.db.utils import load_backend
from django.test import TestCase

import sharded_orm
from sharded_orm import runtime
from sharded_orm.backends.features import features_of
from sharded_orm.exceptions import CrossShardRelation, InvalidID, ShardKeyChanged, ShardKeyRequired
from sharded_orm.ids.layout import PACKED, TimestampedID, TimestampedLayout
from sharded_orm.ids.timestamps import TimestampClock
from sharded_orm.models import TimestampedIDField
from tests.integration.timestamp_race import NOW, Time, race
from tests.photos.models import Note, Story, Tick, Visit, VisitProxy
from tests.queries.conftest import DATABASES
from tests.versions import INSERTS_A_BATCH_ALONE

pytestmark = pytest.mark.every_backend
in_test = pytest.mark.django_db(databases=DATABASES)
committed = pytest.mark.django_db(databases=DATABASES, transaction=True)

assert_queries = TestCase().assertNumQueries
FIELD: Any = Visit._meta.get_field("id")


def shard_of(row: Any) -> int:
    return int(str(row._state.db).rpartition("_")[2])


def on(number: int, **values: Any) -> Visit:
    return Visit.objects.using(f"visits_{number:05d}").create(**values)


def database_makes_ids() -> bool:
    return features_of(connections["visits_00001"]).makes_timestamped_ids


@pytest.fixture
def same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a clock that advances by waiting only, and starts again as in another process."""
    if database_makes_ids():
        pytest.skip("the database makes the ids")

    def restart() -> TimestampClock:
        time = Time(FIELD.layout)
        return TimestampClock(FIELD.layout, clock=time.now, wait=time.wait, draw=lambda size: 0)

    monkeypatch.setitem(FIELD.__dict__, "clock", restart())
    monkeypatch.setattr(FIELD, "restart", lambda: FIELD.__dict__.update(clock=restart()), False)


@in_test
def test_every_way_to_make_a_row() -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    saved = Visit(page="saved")
    saved.save()
    created = Visit.objects.create(page="created")
    bulk = Visit.objects.bulk_create([Visit(page=f"p{n}") for n in range(40)])
    made, is_new = Visit.objects.using("visits_00002").get_or_create(page="made")
    assert is_new
    rows = [saved, created, made, *bulk]
    assert len({row.pk for row in rows}) == 43
    for row in rows:
        parts = TimestampedID.from_int(row.pk)
        assert before < parts.time < datetime.now(UTC) + timedelta(seconds=60)
        assert Visit.objects.get(pk=row.pk).page == row.page
        assert parts.shard == shard_of(Visit.objects.get(pk=row.pk))
    assert len({shard_of(row) for row in bulk}) > 1
    beside = Visit.objects.create(page="near", near=saved)
    assert shard_of(beside) == shard_of(saved)
    assert beside.pk > saved.pk


@in_test
def test_the_id_routes_in_an_embedded_group() -> None:
    visits = [on(number, page=str(number)) for number in (1, 3)]
    with assert_queries(1, using="visits"):
        assert Visit.objects.get(pk=visits[1].pk) == visits[1]
    found = Visit.objects.filter(pk__in=[v.pk for v in visits])
    assert found.explain_routing().shards == (1, 3)
    assert set(found) == set(visits)
    visits[0].page = "changed"
    visits[0].save()
    assert Visit.objects.get(pk=visits[0].pk).page == "changed"


@in_test
def test_an_id_in_a_group_of_another_strategy() -> None:
    stories = [Story.objects.create(author=author, text="x") for author in (5, 6, 7)]
    layout = TimestampedLayout(sequence_bits=4)
    for story in stories:
        assert TimestampedID.from_int(story.pk, layout).shard == shard_of(story)
        assert Story.objects.get(author=story.author, pk=story.pk) == story
    # The row is on the shard of its author, which its id does not contain.
    with pytest.raises(ShardKeyRequired):
        Story.objects.get(pk=stories[0].pk)
    bulk = Story.objects.bulk_create([Story(author=n, text="x") for n in range(50)])
    assert len({story.pk for story in bulk}) == 50
    with pytest.raises(TypeError, match="near"):
        Story(near=stories[0])


@in_test
def test_more_than_a_millisecond_holds() -> None:
    # 16 ids per millisecond.
    stories = Story.objects.bulk_create([Story(author=5, text="x") for _ in range(100)])
    times = [TimestampedID.from_int(s.pk, TimestampedLayout(sequence_bits=4)) for s in stories]
    assert len({t.milliseconds for t in times}) >= 6
    assert [s.pk for s in stories if s.pk is None] == []
    assert len({s.pk for s in stories}) == 100


@in_test
def test_validation_needs_no_id() -> None:
    Visit(page="x").full_clean()
    theirs = on(1, page="theirs")
    with pytest.raises(ValidationError, match="already exists"):
        Visit(page="theirs", near=theirs).full_clean()


@in_test
def test_explicit_ids_and_fixtures_are_kept() -> None:
    own = int(TimestampedID(77, 2, 5))
    visit = Visit.objects.create(pk=own, page="x")
    assert (visit.pk, shard_of(visit)) == (own, 2)
    with pytest.raises(IntegrityError), transaction.atomic(using="visits"):
        Visit.objects.create(pk=own, page="y")
    with pytest.raises(IntegrityError), transaction.atomic(using="visits"):
        Visit.objects.bulk_create([Visit(pk=own, page="y")])
    text = serializers.serialize("json", [Visit(pk=own + 1, page="z")])
    (loaded,) = serializers.deserialize("json", text, using="visits_00002")
    loaded.save(using="visits_00002")
    assert Visit.objects.get(pk=own + 1).page == "z"


@committed
def test_a_new_row_costs_one_insert() -> None:
    near = on(1, page="warm")
    with assert_queries(1, using="visits_00001"):
        Visit.objects.create(page="x", near=near)
    # Before Django 6.0: BEGIN, INSERT, COMMIT.
    with assert_queries(1 if INSERTS_A_BATCH_ALONE else 3, using="visits_00001"):
        Visit.objects.bulk_create([Visit(page=f"b{n}", near=near) for n in range(10)])


@committed
@pytest.mark.parametrize("inside", [False, True])
def test_an_id_of_another_process_is_drawn_again(same_time: None, inside: bool) -> None:
    theirs = [on(1, page=f"theirs {n}") for n in range(3)]
    FIELD.restart()
    if inside:
        with sharded_orm.atomic(theirs[0]):
            ours = [on(1, page="ours")]
            ours += Visit.objects.bulk_create([Visit(page=str(n), near=theirs[0]) for n in "ab"])
    else:
        ours = [on(1, page="ours")]
        ours += Visit.objects.bulk_create([Visit(page=str(n), near=theirs[0]) for n in "ab"])
    made = [TimestampedID.from_int(row.pk) for row in (*theirs, *ours)]
    assert [(m.milliseconds - NOW, m.sequence) for m in made] == [
        *((0, 1), (0, 2), (0, 3)),
        *((1, 1), (1, 2), (1, 3)),
    ]
    assert Visit.objects.using("visits_00001").count() == 6


@committed
def test_a_bulk_that_meets_several_ids_of_another_process(same_time: None) -> None:
    theirs = Visit.objects.using("visits_00001").bulk_create(
        [Visit(page=f"theirs {n}") for n in range(5)]
    )
    FIELD.restart()
    near = theirs[0]
    ours = Visit.objects.bulk_create([Visit(page=f"ours {n}", near=near) for n in range(8)])
    assert len({row.pk for row in (*theirs, *ours)}) == 13
    stored = Visit.objects.using("visits_00001").values_list("page", "pk")
    assert dict(stored) == {row.page: row.pk for row in (*theirs, *ours)}


@committed
def test_what_an_equal_id_costs(same_time: None) -> None:
    theirs = on(1, page="theirs")
    FIELD.restart()
    with assert_queries(3, using="visits_00001"):  # INSERT, SELECT, INSERT
        Visit.objects.create(page="ours", near=theirs)


@committed
def test_another_duplicate_is_the_callers_own(same_time: None) -> None:
    theirs = on(1, page="same page")
    with pytest.raises(IntegrityError), assert_queries(2, using="visits_00001"):
        Visit.objects.create(page="same page", near=theirs)
    ours = Visit(page="same page", near=theirs)
    with pytest.raises(IntegrityError):
        Visit.objects.bulk_create([ours])
    assert ours.pk is None
    ours.page = "another page"
    ours.save()
    assert shard_of(ours) == 1
    ours.delete()
    assert Visit.objects.using("visits_00001").count() == 1


@in_test
def test_updating_conflicts_never_touches_a_row_of_another_process(same_time: None) -> None:
    theirs = on(1, page="theirs")
    FIELD.restart()
    how: dict[str, Any] = {"update_conflicts": True, "update_fields": ["page"]}
    on_mysql = connections["visits_00001"].vendor == "mysql"
    if not on_mysql:
        how["unique_fields"] = ["page"]
    ours = [Visit(page="ours", near=theirs)]
    if on_mysql:
        with pytest.raises(NotSupportedError, match="another process"):
            with transaction.atomic(using="visits_00001"):
                Visit.objects.bulk_create(ours, **how)
    else:
        Visit.objects.bulk_create(ours, **how)
        with pytest.raises(NotSupportedError, match="another process"):
            with transaction.atomic(using="visits_00001"):
                Visit.objects.bulk_create(
                    [Visit(page="x", near=theirs)], **{**how, "unique_fields": ["id"]}
                )
        # A conflict: the row keeps its id, and the instance does not get it.
        again = Visit(page="theirs", near=theirs)
        Visit.objects.bulk_create([again], **how)
        assert again.pk is None
    assert Visit.objects.get(pk=theirs.pk).page == "theirs"


@in_test
@pytest.mark.postgresql_settings
def test_conflicts_where_the_database_makes_ids() -> None:
    theirs = on(1, page="theirs")
    ours = [Visit(page="ours", near=theirs), Visit(page="theirs", near=theirs)]
    Visit.objects.bulk_create(ours, ignore_conflicts=True)
    stored = Visit.objects.using("visits_00001")
    assert set(stored.values_list("page", flat=True)) == {"ours", "theirs"}
    assert stored.get(page="theirs").pk == theirs.pk
    again = [Visit(page="ours", near=theirs), Visit(page="new", near=theirs)]
    Visit.objects.bulk_create(
        again, update_conflicts=True, update_fields=["page"], unique_fields=["page"]
    )
    ids = {row.pk for row in stored}
    assert len(ids) == 3
    assert all(TimestampedID.from_int(pk).shard == 1 for pk in ids)
    assert {row.pk for row in again} < ids


@committed
@pytest.mark.parametrize("guarded", [True, False])
def test_two_processes_at_the_same_instant(guarded: bool) -> None:
    # Queried first, so that the shard exists and is emptied after the test.
    assert not Visit.objects.using("visits_00001").exists()
    connections["visits_00001"].close()
    answers = race(runtime.group("visits"), guarded=guarded)
    ids = [value for answer in answers for value in answer["ids"]]
    assert len(ids) == len(set(ids)) == Visit.objects.using("visits_00001").count()
    if database_makes_ids():
        # Of both, with the same clock.
        assert [answer["error"] for answer in answers] == ["", ""]
        return
    if not guarded:
        assert any("IntegrityError" in answer["error"] for answer in answers)
        return
    assert [answer["error"] for answer in answers] == ["", ""]
    assert sum(answer["again"] for answer in answers) >= 20


@committed
def test_it_does_not_try_for_ever(same_time: None, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = on(1, page="theirs")
    monkeypatch.setattr(FIELD.clock, "take", lambda shard, table, count=1: [theirs.pk] * count)
    with pytest.raises(IntegrityError):
        Visit.objects.create(page="ours", near=theirs)
    assert Visit.objects.using("visits_00001").count() == 1


@in_test
def test_ignoring_conflicts_needs_ids(same_time: None) -> None:
    theirs = on(1, page="theirs")
    FIELD.restart()
    ours = Visit(page="ours", near=theirs)
    with pytest.raises(NotSupportedError, match=r"ignore_conflicts.*another process"):
        with transaction.atomic(using="visits_00001"):
            Visit.objects.bulk_create([ours], ignore_conflicts=True)
    assert ours.pk is None
    given = int(TimestampedID(88, 1, 5))
    Visit.objects.bulk_create([Visit(pk=given, page="x")] * 2, ignore_conflicts=True)
    assert Visit.objects.get(pk=given).page == "x"
    assert Visit.objects.get(pk=theirs.pk).page == "theirs"


@in_test
def test_proxies_make_ids_too() -> None:
    near = on(1, page="near")
    (row,) = VisitProxy.objects.bulk_create([VisitProxy(page="x", near=near)])
    saved = VisitProxy.objects.create(page="y", near=near)
    for made in (row, saved):
        assert TimestampedID.from_int(made.pk).shard == 1
        assert VisitProxy.objects.get(pk=made.pk) == made


@in_test
def test_a_given_id_that_routes_is_of_the_rows_shard() -> None:
    visit = on(3, page="x")
    own, other = int(TimestampedID(77, 3, 5)), int(TimestampedID(77, 2, 5))
    assert Tick.objects.get(pk=Tick.objects.create(pk=own, visit=visit).pk).visit_id == visit.pk
    for make in (
        lambda: Tick.objects.create(pk=other, visit=visit),
        lambda: Tick.objects.bulk_create([Tick(pk=other, visit=visit)]),
        lambda: Tick.objects.bulk_create([Tick(visit=visit), Tick(pk=other, visit=visit)]),
    ):
        with pytest.raises(CrossShardRelation, match="Leave the id out"):
            with transaction.atomic(using="visits"):
                make()
    # If the id does not route, it may carry any shard.
    assert Story.objects.create(pk=own, author=5, text="x").pk == own


@in_test
def test_an_id_that_holds_its_shard_is_not_updated() -> None:
    tick = Tick.objects.create(visit=on(3, page="x"))
    other = int(TimestampedID(77, 2, 5))
    with pytest.raises(ShardKeyChanged, match="holds the shard"):
        Tick.objects.filter(pk=tick.pk).update(id=other)
    with pytest.raises(ShardKeyChanged, match="holds the shard"):
        Note.objects.scatter().update(stamp=other)
    with pytest.raises(ShardKeyChanged, match="holds the shard"):
        Note.objects.bulk_update([Note.objects.create(text="x")], ["stamp"])
    assert Tick.objects.get(pk=tick.pk) == tick


@committed
def test_a_bulk_whose_last_batch_fails_can_be_tried_again() -> None:
    near = on(1, page="near")
    rows = [Visit(page=page, near=near) for page in ("a", "b", "near")]
    with pytest.raises(IntegrityError):
        Visit.objects.bulk_create(rows, batch_size=1)
    assert [row.pk for row in rows] == [None] * 3
    rows[2].page = "c"
    Visit.objects.bulk_create(rows, batch_size=1)
    assert [shard_of(row) for row in rows] == [1] * 3
    assert Visit.objects.using("visits_00001").count() == 4


@committed
def test_beside_a_packed_id(monkeypatch: pytest.MonkeyPatch) -> None:
    field: Any = Note._meta.get_field("stamp")
    theirs = Note.objects.using("pins_00005").create(text="theirs")
    rest = iter([theirs.stamp])  # once, as if by another process
    take = field.clock.take
    monkeypatch.setattr(
        field.clock,
        "take",
        lambda shard, table, count=1: list(rest) or take(shard, table, count),
        raising=False,
    )
    with sharded_orm.atomic(theirs):
        ours = Note.objects.create(text="ours", near=theirs)
    assert shard_of(ours) == 5
    assert ours.stamp != theirs.stamp
    assert Note.objects.get(pk=ours.pk).stamp == ours.stamp


def test_on_postgresql_the_database_makes_the_id(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psycopg")
    # Compiled by Django's own backend; nothing here connects.
    settings = {**connections["default"].settings_dict, "NAME": "none", "OPTIONS": {}}
    postgresql = load_backend("django.db.backends.postgresql").DatabaseWrapper(settings, "x")
    monkeypatch.setattr(
        "sharded_orm.models.fields.timestamped.connections", {"visits_00001": postgresql}
    )
    monkeypatch.setitem(FIELD.__dict__, "_confirmed", {"visits_00001"})
    one, two = (int(TimestampedID(77, 1, number)) for number in (1, 2))
    visits = [Visit(page="a"), Visit(page="b")]
    fields = [FIELD, Visit._meta.get_field("page")]

    def insert(returning: Any) -> list[Any]:
        query = InsertQuery(Visit)
        query.insert_values(fields, visits)
        compiler = query.get_compiler(connection=postgresql)
        compiler.returning_fields = list(returning)
        ((sql, params),) = compiler.as_sql()
        assert sql.endswith('VALUES (DEFAULT, %s), (DEFAULT, %s) RETURNING "photos_app_visit"."id"')
        assert params == ("a", "b")
        return [(one,), (two,)]

    assert FIELD.insert_rows(visits, "visits_00001", [], insert) == [(), ()]
    assert [visit.pk for visit in visits] == [one, two]

    def fail(returning: Any) -> list[Any]:
        raise IntegrityError

    visits = [Visit(page="a")]
    with pytest.raises(IntegrityError):
        FIELD.insert_rows(visits, "visits_00001", [], fail)
    assert visits[0].pk is None

    # Some of the inserted rows may have ids, if the id is not the primary key.
    given = int(TimestampedID(77, 1, 5))
    visits = [Visit(pk=given, page="a"), Visit(page="b")]
    answer = FIELD.insert_rows(visits, "visits_00001", [], lambda returning: [(given,), (two,)])
    assert answer == [(), ()]
    assert [visit.pk for visit in visits] == [given, two]


def test_the_field_in_migrations() -> None:
    epoch = datetime(2030, 1, 1, tzinfo=UTC)
    for field in (
        TimestampedIDField(),
        TimestampedIDField(epoch=epoch),
        TimestampedIDField(layout=TimestampedLayout(epoch, sequence_bits=4)),
    ):
        _, path, args, kwargs = field.deconstruct()
        assert path == "sharded_orm.models.fields.TimestampedIDField"
        again = TimestampedIDField(*args, **kwargs)
        assert (again.layout, again.epoch) == (field.layout, field.epoch)
        text, imports = MigrationWriter.serialize(field)
        names: dict[str, Any] = {}
        exec("\n".join([*imports, f"field = {text}"]), names)
        assert names["field"].layout == field.layout
    with pytest.raises(TypeError, match="either"):
        TimestampedIDField(epoch=epoch, layout=TimestampedLayout())
    with pytest.raises(InvalidID):
        TimestampedIDField(epoch=datetime(2030, 1, 1))
    with pytest.raises(TypeError, match="no TimestampedLayout"):
        TimestampedIDField(layout=PACKED)  # type: ignore[arg-type]
