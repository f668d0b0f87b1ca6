"""``save()`` and ``update()`` by plans: the same statements, rows and errors as Django's."""

from __future__ import annotations

import copy
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from unittest import mock
from uuid import UUID, uuid4

import pytest
from django.db import DatabaseError, connections, models, transaction
from django.db.models import Q, QuerySet, signals
from django.db.models.signals import post_save, pre_save
from django.db.models.sql.compiler import SQLInsertCompiler, SQLUpdateCompiler
from django.dispatch import Signal
from django.test.utils import CaptureQueriesContext, isolate_apps

from sharded_orm import bound
from sharded_orm.exceptions import CrossKeyRelation, ShardKeyChanged
from sharded_orm.models import ShardedModel
from sharded_orm.models.plans import inserts, saves
from sharded_orm.models.plans.stored_rows import SaveMethods
from sharded_orm.models.plans.updates import has_placeholder
from sharded_orm.models.querysets.plans import without_plans
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from tests.photos.models import Album, Board, Photo, Story, Tag, Visit
from tests.queries.conftest import DATABASES, NEAR, ONE, SHARD, START, TWO
from tests.queries.twins import GROUP
from tests.samples.models import Sample

pytestmark = [pytest.mark.django_db(databases=DATABASES), pytest.mark.every_backend]


@pytest.fixture
def samples(placed: None) -> None:
    for pk, owner in ((1, ONE), (2, ONE), (3, TWO)):
        Sample.objects.create(id=pk, owner=owner, name=f"Sample {pk}", number=pk, at=START, data={})
    saves.forget()
    inserts.forget()


@contextmanager
def nothing_is_compiled() -> Iterator[None]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("This statement was compiled.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SQLUpdateCompiler, "as_sql", refuse)
        patch.setattr(SQLInsertCompiler, "as_sql", refuse)
        yield


def changed(row: Any, values: dict[str, Any]) -> Any:
    vars(row).update(values)
    return row


WRITES: dict[str, Callable[[Any], Any]] = {
    "save": lambda rows: changed(rows["photo"], {"title": "new"}).save(),
    "save of a NULL": lambda rows: changed(rows["photo"], {"stars": None}).save(),
    "save of one field": lambda rows: changed(rows["photo"], {"stars": 9}).save(
        update_fields=["stars"]
    ),
    "save of several fields": lambda rows: changed(
        rows["sample"],
        {"price": Decimal(1), "day": date(2026, 1, 1), "took": timedelta(1), "data": {"a": 1}},
    ).save(update_fields=["price", "day", "took", "data", "at", "number"]),
    "save of bytes": lambda rows: changed(rows["sample"], {"blob": b"\xff'%s"}).save(
        update_fields=["blob"]
    ),
    "save of a deferred row": lambda rows: changed(rows["deferred"], {"stars": 7}).save(),
    "forced": lambda rows: changed(rows["photo"], {"stars": 8}).save(force_update=True),
    "in a block": lambda rows: transaction.atomic(using=SHARD[ONE])(rows["photo"].save)(),
    "update": lambda rows: Photo.objects.filter(user_id=ONE, pk=rows["photo"].pk).update(stars=3),
    "update of several rows": lambda rows: Photo.objects.filter(user_id=ONE).update(
        title="x", stars=None
    ),
    "update of a list": lambda rows: Sample.objects.filter(owner=ONE, id__in=[2, 1]).update(
        name="x", flag=True
    ),
    "update with exclude()": lambda rows: (
        Sample.objects.filter(owner=ONE, text=None).exclude(number=2).update(number=4)
    ),
    "update with a tree": lambda rows: Sample.objects.filter(
        Q(number=2) | ~Q(name="x"), owner=ONE
    ).update(number=4),
    "update of no row": lambda rows: Photo.objects.filter(user_id=ONE, pk=999_999).update(stars=3),
}


@pytest.mark.parametrize("name", WRITES)
def test_the_third_write_of_a_shape_compiles_nothing(
    name: str, rows: list[Photo], samples: None
) -> None:
    def write() -> Any:
        found = {
            "photo": Photo.objects.get(user_id=ONE, pk=rows[0].pk),
            "deferred": Photo.objects.defer("title").get(user_id=ONE, pk=rows[0].pk),
            "sample": Sample.objects.get(owner=ONE, id=1),
        }
        return WRITES[name](found)

    def stored() -> tuple[Any, list[str], Any]:
        with CaptureQueriesContext(connections[GROUP]) as sent:
            result = write()
        with without_plans():
            after = [
                [tuple(map(plain, row)) for row in m.objects.scatter().order_by("pk").values_list()]
                for m in (Photo, Sample)
            ]
        texts = [str(query["sql"]) for query in sent]
        return result, [text for text in texts if "SAVEPOINT" not in text], after

    with without_plans():
        expected = stored()
    for _ in range(2):
        assert stored() == expected
    with nothing_is_compiled():
        assert stored() == expected
    assert len([text for text in expected[1] if text.startswith("UPDATE")]) == 1


INSERTS: dict[str, Callable[[], Any]] = {
    "an id from a ticket server": lambda: Photo(user_id=ONE, title="x", stars=None),
    "an id that the database makes": lambda: Tag(user_id=ONE, name=uuid4().hex),
    "an id that is given": lambda: Sample(id=uuid4().int % 2**62, owner=ONE, data={"a": 1}),
    "an id of time, shard and number": lambda: Visit(page=uuid4().hex),
    "bytes": lambda: Sample(id=uuid4().int % 2**62, owner=ONE, blob=uuid4().bytes),
    "such an id beside a key": lambda: Story(author=ONE, text="x"),
    "an id of shard, type and number": lambda: Board(name="x"),
}


def plain(value: Any) -> Any:
    return bytes(value) if isinstance(value, memoryview) else value


@pytest.mark.parametrize("kind", INSERTS)
def test_the_third_insert_of_a_shape_compiles_nothing(kind: str, samples: None) -> None:
    def insert() -> str:
        row = INSERTS[kind]()
        with CaptureQueriesContext(connections[row._shard_options().group]) as sent:
            row.save(force_insert=True)
        stored = type(row).objects.using(row._state.db).get(pk=row.pk)
        assert {
            field.attname: plain(getattr(stored, field.attname)) for field in row._meta.concrete_fields
        } == {
            field.attname: getattr(row, field.attname) for field in row._meta.concrete_fields
        }  # fmt: skip
        texts = [str(query["sql"]) for query in sent]
        (text,) = [text for text in texts if text.startswith("INSERT")]
        return text.split("VALUES")[0].split("SELECT")[0]

    with without_plans():
        expected = insert()
    for _ in range(2):
        assert insert() == expected
    with nothing_is_compiled():
        assert insert() == expected


class OwnBinaryField(models.BinaryField):  # type: ignore[type-arg]
    def get_placeholder(self, value: Any, compiler: Any, connection: Any) -> str:
        return "%s" if value else "NULL"

    def get_placeholder_sql(self, value: Any, compiler: Any, connection: Any) -> tuple[str, Any]:
        return ("%s", (value,)) if value else ("NULL", ())


def test_sql_of_a_field_may_depend_on_its_value() -> None:
    connection = connections[GROUP]
    assert has_placeholder(OwnBinaryField(), connection)
    for field in (models.BinaryField(), models.CharField()):
        assert not has_placeholder(field, connection)
    field = models.BinaryField()
    for name in ("get_placeholder", "get_placeholder_sql"):
        setattr(field, name, getattr(OwnBinaryField(), name))
    assert has_placeholder(field, connection)


def test_a_null_after_a_value(samples: None) -> None:
    row = Sample.objects.get(owner=ONE, id=1)
    for _ in range(4):
        for number, name in ((1, "x"), (None, "x"), (2, None), (None, None)):
            row.number, row.name = number, name
            row.save(update_fields=["number", "name"])
            assert Sample.objects.filter(owner=ONE, id=1).update(ratio=number) == 1
            stored = Sample.objects.get(owner=ONE, id=1)
            assert (stored.number, stored.name, stored.ratio) == (number, name, number)


def test_values_are_prepared_for_each_write(samples: None) -> None:
    row = Sample.objects.get(owner=ONE, id=1)
    for hour in range(5):
        row.at = datetime(2026, 5, 1, hour, tzinfo=UTC).astimezone()
        row.data, row.code = {"hour": hour}, UUID(int=hour)
        row.save(update_fields=["at", "data", "code"])
        stored = Sample.objects.get(owner=ONE, id=1)
        assert (stored.at, stored.data, stored.code) == (row.at, row.data, row.code)


NEW_IDS = itertools.count(1000)


@pytest.mark.parametrize(
    "write",
    [
        lambda row: row.save(),
        lambda row: row.save(update_fields=["at"]),
        lambda row: Sample.objects.filter(owner=ONE, id=row.id).update(at=row.at),
        lambda row: Sample.objects.filter(owner=ONE, id__in=[row.id]).update(at=row.at),
        lambda row: Sample.objects.create(owner=ONE, at=row.at, id=next(NEW_IDS)),
    ],
)
@pytest.mark.parametrize("at", [datetime(2026, 5, 1), date(2026, 5, 1)])
def test_a_time_without_a_zone_is_warned_of_as_often_as_by_django(
    at: Any, write: Callable[[Any], Any], samples: None
) -> None:
    def warnings_of_a_write() -> list[str]:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            write(row)
        return [str(warning.message) for warning in warned]

    row = Sample.objects.get(owner=ONE, id=1)
    row.at = at
    with without_plans():
        expected = warnings_of_a_write()
    assert expected
    for _ in range(5):
        assert warnings_of_a_write() == expected
    # Nothing is learned from these writes, so others have plans as usual.
    row.at = START
    for _ in range(3):
        assert not warnings_of_a_write()
    with nothing_is_compiled():
        assert not warnings_of_a_write()


def test_a_value_that_the_field_refuses(samples: None) -> None:
    row = Sample.objects.get(owner=ONE, id=1)
    for text in ("1", "2", "3", "4"):
        row.number = text
        row.save(update_fields=["number"])
        assert Sample.objects.get(owner=ONE, id=1).number == int(text)
    row.number = "many"
    with pytest.raises(ValueError, match="'number' expected a number but got 'many'"):
        row.save(update_fields=["number"])
    with pytest.raises(ValueError, match="expected a number"):
        Sample.objects.filter(owner=ONE, id=1).update(number="many")


def test_a_row_that_is_gone(samples: None) -> None:
    row = Sample.objects.get(owner=ONE, id=1)
    for _ in range(3):
        row.save(update_fields=["number"])
    gone = copy.copy(row)
    gone.id = 77
    with pytest.raises(DatabaseError, match="did not affect any rows"), atomic_block():
        gone.save(update_fields=["number"])
    for _ in range(3):
        Photo.objects.create(user_id=ONE, title="x").save()
    lost = Photo.objects.create(user_id=ONE, title="lost")
    Photo.objects.filter(user_id=ONE, pk=lost.pk).delete()
    with pytest.raises(DatabaseError, match="Forced update"), atomic_block():
        lost.save(force_update=True)
    lost.save()
    assert Photo.objects.get(user_id=ONE, pk=lost.pk).title == "lost"


def atomic_block() -> transaction.Atomic:
    return transaction.atomic(using=SHARD[ONE])


@pytest.mark.parametrize("key", [NEAR, TWO])
def test_a_row_of_another_key_is_refused(key: int, rows: list[Photo]) -> None:
    for _ in range(3):
        rows[0].save()
    rows[0].user_id = key
    with pytest.raises(ShardKeyChanged), atomic_block():
        rows[0].save()
    rows[0].user_id = ONE
    rows[0].save()


def test_a_receiver_that_changes_the_key_is_refused(rows: list[Photo]) -> None:
    def move(instance: Any, **kwargs: Any) -> None:
        instance.user_id = TWO

    for _ in range(3):
        rows[0].save()
    pre_save.connect(move, sender=Photo)
    try:
        with pytest.raises(ShardKeyChanged), atomic_block():
            rows[0].save()
    finally:
        pre_save.disconnect(move, sender=Photo)


def test_signals_and_wrappers(rows: list[Photo]) -> None:
    seen: list[Any] = []

    def remember(
        signal: Any, created: Any = None, update_fields: Any = None, **kwargs: Any
    ) -> None:
        seen.append((signal is pre_save, created, update_fields, kwargs["using"], kwargs["raw"]))

    def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        seen.append((sql.split()[0], context["connection"].alias))
        return execute(sql, params, many, context)

    for signal in (pre_save, post_save):
        signal.connect(remember, sender=Photo)
    try:
        runs = []
        for _ in range(4):
            seen.clear()
            with connections[SHARD[ONE]].execute_wrapper(wrapper):
                rows[0].save(update_fields=["stars"])
            runs.append(list(seen))
    finally:
        for signal in (pre_save, post_save):
            signal.disconnect(remember, sender=Photo)
    names = frozenset({"stars"})
    assert runs == [[
        (True, None, names, SHARD[ONE], False), ("UPDATE", SHARD[ONE]), (False, False, names, SHARD[ONE], False),
    ]] * 4  # fmt: skip


def test_pre_save_of_a_field_is_called_once(
    rows: list[Photo], monkeypatch: pytest.MonkeyPatch
) -> None:
    field = Photo._meta.get_field("posted_at")
    monkeypatch.setattr(field, "auto_now", True)
    times = []
    for _ in range(4):
        rows[0].save(update_fields=["posted_at"])
        times.append(rows[0].posted_at)
        assert Photo.objects.get(user_id=ONE, pk=rows[0].pk).posted_at == rows[0].posted_at
    assert len(set(times)) == 4
    calls: list[int] = []
    monkeypatch.setattr(field, "pre_save", lambda row, add: calls.append(1) or row.posted_at)
    for _ in range(4):
        rows[0].save()
    assert len(calls) == 4


def test_the_third_save_of_a_shape_leaves_out_what_django_finds_out_each_time(
    rows: list[Photo], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("Django has saved the row.")

    row = rows[0]
    for kwargs in ({}, {"update_fields": ["stars"]}, {"force_update": True}):
        for _ in range(2):
            row.save(**kwargs)
        with monkeypatch.context() as patch:
            patch.setattr(models.Model, "_save_table", refuse)
            row.stars = 7 + len(kwargs)
            row.save(**kwargs)
            with pytest.raises(AssertionError), atomic_block(), without_plans():
                row.save(**kwargs)
        assert Photo.objects.get(user_id=ONE, pk=row.pk).stars == row.stars


def called_by(call: Callable[[], Any]) -> set[Any]:
    """Return the code of all functions that ``call`` has called."""
    codes: set[Any] = set()
    sys.setprofile(lambda frame, event, _: codes.add(frame.f_code) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return codes


DJANGO_SAVES = {models.Model.save.__code__, models.Model.save_base.__code__}


def test_the_third_save_of_a_row_that_nobody_observes_calls_no_method_of_django(
    rows: list[Photo],
) -> None:
    row = rows[0]
    saves.forget()
    for kwargs in ({}, {"update_fields": ["stars"]}):
        for number in range(3):
            row.stars = number
            codes = called_by(lambda kwargs=kwargs: row.save(**kwargs))
            assert number == 2 or codes >= DJANGO_SAVES
        assert DJANGO_SAVES.isdisjoint(codes)
        assert Photo.objects.get(user_id=ONE, pk=row.pk).stars == 2


def test_a_receiver_that_comes_later_is_called(rows: list[Photo]) -> None:
    for _ in range(3):
        rows[0].save()
    for signal in (pre_save, post_save):
        seen: list[Any] = []

        def receive(seen: list[Any] = seen, **kwargs: Any) -> None:
            seen.append(kwargs)

        signal.connect(receive)  # of all models
        try:
            rows[0].save()
        finally:
            signal.disconnect(receive)
        assert [kwargs["instance"] for kwargs in seen] == rows[:1]


@pytest.mark.parametrize("name", ["pre_save", "post_save"])
def test_a_signal_that_a_test_replaces_is_sent(
    name: str, rows: list[Photo], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        rows[0].save()
    sent: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(getattr(signals, name), "send", lambda **kwargs: sent.append(kwargs))
        rows[0].save()
    assert len(sent) == 1
    with mock.patch.object(models.base, name) as signal:
        rows[0].save()
    signal.send.assert_called_once()


def test_a_send_that_a_library_replaces_is_called(
    rows: list[Photo], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        rows[0].save()
    sent: list[Signal] = []
    monkeypatch.setattr(Signal, "send", lambda signal, **kwargs: sent.append(signal))
    rows[0].save()
    assert sent == [pre_save, post_save]


METHODS = ["save_base", "_save_parents", "_prepare_related_fields_for_save"]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *[("the model", name) for name in (*METHODS, "_save_table", "_do_update", "_get_pk_val", "_is_pk_set")],
        *[("the row", name) for name in METHODS],
        *[("Django", name) for name in ("save", *METHODS)],
    ],
)  # fmt: skip
def test_a_method_of_the_project_is_called(
    owner: str, name: str, rows: list[Photo], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = rows[0]
    for _ in range(3):
        row.save()
    calls: list[Any] = []
    target: Any = {"the model": Photo, "the row": row, "Django": models.Model}[owner]
    method = getattr(target, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return method(*args, **kwargs)

    monkeypatch.setattr(target, name, counted)
    row.save()
    assert calls


@isolate_apps("tests.photos")
def test_a_mixin_after_our_class_is_called() -> None:
    class Named(models.Model):
        class Meta:
            abstract = True
            app_label = "photos"

    class Letter(ShardedModel, Named):
        class Meta:
            app_label = "photos"

        class ShardMeta:
            group = GROUP
            shard_key = "id"

    methods = SaveMethods(ShardedModel)
    assert methods.are_used_by(Letter())
    for name in ("save", "save_base", "_save_table", "_do_update"):
        setattr(Named, name, lambda *args, **kwargs: None)
        assert not methods.are_used_by(Letter())
        delattr(Named, name)
    assert methods.are_used_by(Letter())


def test_another_router_is_asked(rows: list[Photo], settings: Any) -> None:
    for _ in range(3):
        rows[0].save()
    asked: list[Any] = []

    class Router:
        def db_for_write(self, model: Any, **hints: Any) -> str:
            asked.append(hints["instance"])
            return SHARD[TWO]

    settings.DATABASE_ROUTERS = [Router(), *settings.DATABASE_ROUTERS]
    with pytest.raises(ShardKeyChanged):
        rows[0].save()
    assert asked[0] is rows[0]


def test_related_rows_are_checked(rows: list[Photo]) -> None:
    row = Photo.objects.get(user_id=ONE, pk=rows[0].pk)
    album = Album.objects.create(owner_id=ONE, title="x")
    for _ in range(3):
        row.save()
    row.album = album
    row.save()
    assert Photo.objects.get(user_id=ONE, pk=row.pk).album_id == album.pk
    row.album = Album(owner_id=ONE, title="x")
    with pytest.raises(ValueError, match="unsaved related object"):
        row.save()
    row.album.owner_id = TWO
    row.album.save()
    with pytest.raises(CrossKeyRelation):
        row.save()


def test_a_missing_row_is_looked_for_once(rows: list[Photo]) -> None:
    row = rows[0]
    for _ in range(3):
        row.save()
    Photo.objects.filter(user_id=ONE, pk=row.pk).delete()
    with CaptureQueriesContext(connections[GROUP]) as sent:
        row.save()
    assert [query["sql"].split()[0] for query in sent] == ["UPDATE", "SELECT", "INSERT"]
    assert Photo.objects.filter(user_id=ONE, pk=row.pk).exists()


def test_deferred_fields_are_loaded_in_the_order_of_django(rows: list[Photo]) -> None:
    for _ in range(3):
        rows[0].save()

    def statements() -> list[str]:
        row = Photo.objects.only("title").get(user_id=ONE, pk=rows[0].pk)
        with CaptureQueriesContext(connections[GROUP]) as sent:
            row.save_base()
        return [query["sql"] for query in sent]

    with without_plans():
        expected = statements()
    assert statements() == expected


def test_select_on_save(rows: list[Photo], monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        rows[0].save()
    monkeypatch.setattr(Photo._meta, "select_on_save", True)
    with CaptureQueriesContext(connections[GROUP]) as sent:
        rows[0].save()
    assert [query["sql"].split()[0] for query in sent] == ["SELECT", "UPDATE"]


class Hidden(models.Manager[Any]):
    """A base manager of a project, which hides some rows."""

    def get_queryset(self) -> QuerySet[Any]:
        return super().get_queryset().exclude(title="hidden")


def test_a_base_manager_of_the_project(rows: list[Photo], monkeypatch: pytest.MonkeyPatch) -> None:
    row = rows[0]
    for _ in range(3):
        row.save(update_fields=["stars"])
    manager = Hidden()
    manager.model = Photo
    monkeypatch.setitem(vars(Photo._meta), "base_manager", manager)
    row.save(update_fields=["stars"])
    Photo.objects.filter(user_id=ONE, pk=row.pk).update(title="hidden")
    with pytest.raises(DatabaseError, match="did not affect"), atomic_block():
        row.save(update_fields=["stars"])


def test_a_bound_key(rows: list[Photo]) -> None:
    for number in range(4):
        with bound(user_id=ONE):
            rows[0].stars = number
            rows[0].save()
            assert Photo.objects.update(stars=number) == 2
            assert Photo.objects.filter(pk=rows[1].pk).update(stars=9) == 0


class Counting(ShardedQuerySet[Any]):
    def update(self, **kwargs: Any) -> Any:
        return super().update(**{**kwargs, "title": "of the project"})


class Starred(QuerySet[Any]):
    def update(self, **kwargs: Any) -> Any:
        return super().update(**{**kwargs, "stars": 5})


class StarredPhotos(ShardedQuerySet[Any], Starred):
    pass


def test_an_update_of_the_project_is_called(rows: list[Photo]) -> None:
    for _ in range(4):
        assert Counting(Photo).filter(user_id=ONE).update(stars=1) == 2
        assert set(Photo.objects.filter(user_id=ONE).values_list("title", "stars")) == {
            ("of the project", 1)
        }
        assert StarredPhotos(Photo).filter(user_id=ONE).update(title="x") == 2
        assert set(Photo.objects.filter(user_id=ONE).values_list("title", "stars")) == {("x", 5)}


def test_the_rows_of_a_queryset_are_read_again_after_update(rows: list[Photo]) -> None:
    for number in range(4):
        photos = Photo.objects.filter(user_id=ONE)
        assert len(photos) == 2
        assert photos.update(stars=number) == 2
        assert {photo.stars for photo in photos} == {number}


def test_saves_of_many_shapes_are_left_to_django(
    samples: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saves, "MAX_SAVES", 1)
    row = Sample.objects.get(owner=ONE, id=1)
    for number in range(4):
        for name in ("number", "ratio"):
            setattr(row, name, number)
            row.save(update_fields=[name])
            assert getattr(Sample.objects.get(owner=ONE, id=1), name) == number
    assert len(saves._saves[Sample]) == 1


@pytest.mark.parametrize("switch", ["setting", "block"])
def test_plans_can_be_switched_off(switch: str, rows: list[Photo], settings: Any) -> None:
    for _ in range(3):
        rows[0].save()
    if switch == "setting":
        settings.SHARDED_ORM = {**settings.SHARDED_ORM, "WRITE_PLANS": False}
    with without_plans() if switch == "block" else nullcontext(), nothing_is_compiled():
        for write in (rows[0].save, lambda: Photo.objects.filter(user_id=ONE).update(stars=1)):
            with pytest.raises(AssertionError), atomic_block():
                write()
