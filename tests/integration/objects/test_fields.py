"""Fields in bodies: conversion, validation, old bodies, new and former fields, damage."""

from __future__ import annotations

import copy
import json
import uuid
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.core.serializers.json import DjangoJSONEncoder
from django.db import connections, models
from django.db.migrations.autodetector import MigrationAutodetector
from django.db.migrations.graph import MigrationGraph
from django.db.migrations.state import ModelState, ProjectState
from django.db.models import F
from django.test.utils import CaptureQueriesContext, isolate_apps

from sharded_orm.contrib.objects import Mapping, ObjectLookup, ShardedObject, fields
from sharded_orm.contrib.objects.body_column import prepare_body
from sharded_orm.contrib.objects.checks import check_objects
from sharded_orm.contrib.objects.exceptions import (
    BodyFieldInQuery,
    BodyTooLarge,
    DamagedObject,
    InvalidObjectType,
    InvalidValue,
    UnsavedChanges,
    WrongObjectType,
)
from sharded_orm.contrib.objects.mapping_manager import id_of
from tests.integration.objects.conftest import DATABASES, on, set_body
from tests.pinboards.models import Board, Everything, Pin, User

pytestmark = pytest.mark.django_db(databases=DATABASES)

#: The options of classes that tests declare.
MADE = {"group": "pins", "type_id": 99}
VALUES: dict[str, Any] = {
    "text": "Grüße, 猫 and \U0001f408",
    "number": -(1 << 62),
    "is_on": True,
    "ratio": 0.1,
    "price": Decimal("12.50"),
    "day": date(2026, 2, 3),
    "moment": datetime(2026, 2, 3, 4, 5, 6, 789012, tzinfo=UTC),
    "hour": time(4, 5, 6, 7),
    "length": timedelta(days=1, microseconds=3),
    "code": uuid.UUID(int=7),
    "address": "192.0.2.1",
    "email": "ada@example.org",
    "slug": "a-b",
    "tags": ["a", {"b": [1, 2.5, None]}],
    "title": "Title",
}


def stored(row: Any) -> dict[str, Any]:
    with connections[row._state.db].cursor() as cursor:
        cursor.execute(f"SELECT data FROM {row._meta.db_table} WHERE id = %s", [row.pk])
        (body,) = cursor.fetchone()
    return json.loads(body)


@pytest.mark.every_backend
def test_each_kind_of_value_is_read_as_it_was_written() -> None:
    made = Everything.objects.create(**VALUES)
    read = Everything.objects.get(made.pk)
    assert {name: getattr(read, name) for name in VALUES} == VALUES
    assert type(read.price) is Decimal
    assert read.created.tzinfo is not None
    as_json = json.loads(json.dumps(read.to_dict()))
    assert as_json["id"] == made.pk
    assert Everything(**{k: v for k, v in as_json.items() if k != "id"}).to_dict() == (
        as_json | {"id": None}
    )


def test_values_of_a_wrong_kind_are_refused_when_they_are_assigned() -> None:
    for name, value in [
        ("number", "many"), ("price", "x"), ("day", "2026-13-01"), ("code", "7"),
        ("length", "long"), ("number", F("version")), ("day", 5), ("hour", object()),
        ("number", float("inf")),
    ]:  # fmt: skip
        with pytest.raises(ValidationError):
            Everything(**{name: value})


def test_save_runs_the_validators_of_values_that_changed() -> None:
    for cls, values in [
        (User, {"name": "x" * 41}),
        (User, {"name": None}),
        (Pin, {"board_id": None}),
        (Everything, {"email": "nobody"}),
        (Everything, {"ratio": float("nan")}),
        (Everything, {"tags": [object()]}),
        (Everything, {"number": 1 << 63}),
        (Everything, {"text": "a\0b"}),
        (Everything, {"text": "a\ud800b"}),
        (Everything, {"tags": [{"\0": 1}]}),
    ]:
        with pytest.raises(InvalidValue):
            cls.objects.create(**values)
    user = User.objects.create(name="Ada")
    set_body(user, json.dumps({"name": "x" * 41}))  # from a time without the limit
    read = User.objects.get(user.pk)
    read.age = 36
    read.save()
    read.name = "y" * 41
    with pytest.raises(InvalidValue, match="name"):
        read.save()
    assert stored(user) == {"name": "x" * 41, "age": 36}


@pytest.mark.parametrize("levels", [101, 480, 5_000])
@pytest.mark.every_backend
def test_a_value_with_more_levels_than_python_can_use_is_refused(levels: int) -> None:
    row = on(Everything, 0, tags=["a"])
    deep: list[Any] = []
    for _ in range(levels - 1):
        deep = [deep]
    with pytest.raises(InvalidValue, match="at most 100 levels"):
        Everything.objects.create(tags=deep)
    with pytest.raises(InvalidValue, match="at most 100 levels"):
        Everything.objects.bulk_create([Everything(tags=deep)])
    with pytest.raises(ValidationError, match=r"levels|valid JSON"):
        Everything(tags=deep).full_clean(exclude=VALUES.keys() - {"tags"})
    with pytest.raises(InvalidValue, match="at most 100 levels"), row.edit():
        row.tags.append(deep)
    assert row.tags == Everything.objects.get(row.pk).tags == ["a"]


def test_a_value_with_a_hundred_levels_is_read_edited_and_copied() -> None:
    deep: list[Any] = ["a"]
    for _ in range(99):
        deep = [deep]
    row = on(Everything, 0, tags=deep)
    with row.edit():
        row.text = "b"
    read = copy.copy(Everything.objects.get(row.pk))
    assert (read.tags, read.text) == (deep, "b")


@pytest.mark.every_backend
def test_text_that_looks_like_an_escape_is_stored() -> None:
    text = "\\u0000 \\ud800 \\\\u0000 \U0001f408"
    assert Everything.objects.get(Everything.objects.create(text=text).pk).text == text


def test_changes_in_place_are_changes() -> None:
    row = on(Everything, 0, tags=["a"])
    mine = ["b"]
    row.tags = mine
    mine.append("c")
    row.save()
    assert Everything.objects.get(row.pk).tags == ["b", "c"]
    mine.append("d")
    with pytest.raises(UnsavedChanges, match="tags"), row.edit():
        pass
    read = Everything.objects.get(row.pk)
    assert read.tags == ["b", "c"]
    with read.edit():
        read.tags.append(1)
    assert Everything.objects.get(row.pk).tags == ["b", "c", 1]
    read.tags[2] = True  # equal to 1 in Python
    with pytest.raises(UnsavedChanges, match="tags"), read.edit():
        pass
    read.refresh_from_db()
    with read.edit():
        assert read.tags == ["b", "c", 1]


def test_a_value_that_is_taken_out_of_the_body_is_the_default() -> None:
    row = on(Everything, 0, tags=["a"], text="a")
    row.text = "b"
    assert row.tags.pop() == "a"
    row.data = {"number": 7}
    row.save()
    assert stored(row) == {"number": 7}
    with row.edit():
        assert (row.number, row.text, row.tags) == (7, "", [])


@pytest.mark.every_backend
def test_old_bodies_have_the_defaults_of_new_fields_and_keep_what_nobody_knows() -> None:
    row = Everything.objects.create()
    set_body(row, json.dumps({"text": "old", "of_a_newer_version": [1], "colour": "red"}))
    read = Everything.objects.get(row.pk)
    assert (read.number, read.price, read.tags, read.title) == (0, None, [], "")
    read.tags.append("new")
    assert read.tags == ["new"]
    read.save()
    body = stored(row)
    assert body == {"text": "old", "of_a_newer_version": [1], "tags": ["new"]}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (fields.Decimal(max_digits=5, decimal_places=2, default=0), Decimal(0)),
        (fields.Float(default=1), 1.0),
        (fields.Integer(default="7"), 7),
        (fields.Boolean(default=0), False),
        (fields.Date(default="2026-02-03"), date(2026, 2, 3)),
        (fields.UUID(default=str(uuid.UUID(int=7))), uuid.UUID(int=7)),
        (fields.Text(default="x"), "x"),
    ],
)
@isolate_apps("tests.pinboards")
def test_defaults_of_old_bodies_are_converted_as_stored_values(field: Any, value: Any) -> None:
    meta = {
        "Meta": type("Meta", (), {"app_label": "pinboards"}),
        "ObjectMeta": type("ObjectMeta", (), MADE),
    }
    attrs = {"__module__": __name__, **meta, "field": copy.copy(field)}
    cls: Any = type(ShardedObject)(f"With{type(field).__name__}", (ShardedObject,), attrs)
    row = cls()
    row._state.adding = False
    assert (row.field, type(row.field)) == (value, type(value))


@pytest.mark.every_backend
def test_a_former_name_is_read_and_the_next_save_renames_it() -> None:
    row = Everything.objects.create()
    set_body(row, json.dumps({"heading": "first"}))
    read = Everything.objects.get(row.pk)
    assert read.title == "first"
    with read.edit():
        read.number = 2
    assert stored(row) == {"title": "first", "number": 2}
    set_body(row, json.dumps({"name": "second", "heading": "first", "title": "third"}))
    read = Everything.objects.get(row.pk)
    assert read.title == "third"
    read.title = "fourth"
    read.save()
    assert stored(row) == {"title": "fourth"}


@isolate_apps("tests.pinboards")
def test_code_before_and_after_a_rename_understand_each_other() -> None:
    def version(**attrs: Any) -> Any:
        meta = {
            "Meta": type("Meta", (), {"app_label": "pinboards"}),
            "ObjectMeta": type("ObjectMeta", (), {"group": "pins", "type_id": 97}),
        }
        name = f"Renamed{next(iter(attrs))}"
        return type(ShardedObject)(
            name, (ShardedObject,), {"__module__": __name__, **meta, **attrs}
        )

    first, second = (
        version(title=fields.Text(was="heading")),
        version(heading=fields.Text(was="title")),
    )
    body: dict[str, Any] = {"title": "0"}
    for number in range(4):
        for cls, name in ((first, "title"), (second, "heading"), (second, "heading")):
            row = cls(data=body)
            assert getattr(row, name) == str(number)
            prepare_body(row, add=False)
            assert body == {name: str(number)}
        setattr(row, name, str(number + 1))


@pytest.mark.every_backend
@isolate_apps("tests.pinboards")
def test_a_new_field_needs_no_statement_and_no_migration() -> None:
    meta = {
        "__module__": __name__,
        "Meta": type("Meta", (), {"app_label": "pinboards"}),
        "ObjectMeta": type("ObjectMeta", (), {"group": "pins", "type_id": 21}),
    }
    newer_fields = {"title": fields.Text(was="name"), "colour": fields.Text(default="red")}
    newer: Any = type(ShardedObject)("Board", (ShardedObject,), {**meta, **newer_fields})
    states = []
    for cls in (Board, newer):
        state = ProjectState()
        state.add_model(ModelState.from_model(cls))
        states.append(state)
    assert MigrationAutodetector(*states).changes(MigrationGraph()) == {}

    boards = [on(Board, n, name=str(n)) for n in range(3)]
    with CaptureQueriesContext(connections["pins"]) as captured:
        batch = newer.objects.get_many(board.pk for board in boards)
        assert [(row.title, row.colour) for row in batch.values()] == [
            (str(n), "red") for n in range(3)
        ]
    assert captured.captured_queries
    assert {query["sql"].lstrip("(").split()[0] for query in captured} == {"SELECT"}


@pytest.mark.parametrize("body", ['"text"', "[1]", "7"])
@pytest.mark.every_backend
def test_a_damaged_body_has_a_named_error_and_the_rest_is_served(body: str) -> None:
    pins = [on(Pin, n, board=on(Board, 0, name="b"), note=str(n)) for n in range(3)]
    set_body(pins[1], body)
    with pytest.raises(DamagedObject, match=rf"Pin\(pk={pins[1].pk}\) on 'pins_00001'"):
        Pin.objects.get(pins[1].pk)
    batch = Pin.objects.get_many(pin.pk for pin in pins)
    assert list(batch.values()) == [pins[0], pins[2]]
    assert set(batch.damaged) == {pins[1].pk}
    damaged = Pin.objects.with_deleted().get(pk=pins[1].pk)
    damaged.delete()
    assert not Pin.objects.get_many([pins[1].pk]).damaged
    damaged.purge()
    assert not Pin.objects.with_deleted().filter(pk=pins[1].pk).exists()


@pytest.mark.every_backend
def test_a_damaged_value_names_the_field_and_can_be_mended() -> None:
    row = Everything.objects.create()
    set_body(row, json.dumps({"day": "yesterday", "number": 1}))
    read = Everything.objects.get(row.pk)
    assert read.number == 1
    with pytest.raises(DamagedObject, match="'yesterday' for 'day'"):
        read.day  # noqa: B018  # the access raises
    with read.edit():
        read.day = date(2026, 1, 1)
    assert Everything.objects.get(row.pk).day == date(2026, 1, 1)


@pytest.mark.every_backend
def test_a_body_above_the_limit_is_refused_before_it_is_sent() -> None:
    with CaptureQueriesContext(connections["pins_00000"]) as captured:
        with pytest.raises(BodyTooLarge, match="5000"):
            on(Everything, 0, text="x" * 5_000)
    assert not [q for q in captured if "INSERT" in q["sql"]]
    row = on(Everything, 0, text="x")
    with pytest.raises(BodyTooLarge), row.edit():
        row.text = "x" * 5_000
    assert row.text == Everything.objects.get(row.pk).text == "x"


def test_queries_by_a_field_of_the_body_are_refused() -> None:
    for query in [
        lambda: Board.objects.filter(name="x").scatter().first(),
        lambda: list(Board.objects.order_by("name").scatter()),
        lambda: list(Board.objects.scatter().values("name")),
        lambda: Board.objects.scatter().exclude(name__contains="x").count(),
        lambda: Board.objects.get_or_create(name="x"),
    ]:
        with pytest.raises(BodyFieldInQuery, match=r"Board\.name"):
            query()


@pytest.mark.every_backend
def test_references_are_to_objects_of_any_shard_and_of_one_type() -> None:
    board = on(Board, 3, name="far")
    pin = on(Pin, 5, board=board)
    read = Pin.objects.get(pin.pk)
    assert (read.board_id, read.board, read.board._state.db) == (board.pk, board, "pins_00003")
    for value in (pin, "x"):
        with pytest.raises(WrongObjectType):
            read.board = value
    with pytest.raises(WrongObjectType, match="type 22"):
        read.board_id = pin.pk
    with pytest.raises(WrongObjectType, match="no id yet"):
        read.board = Board(name="new")
    board.delete()
    with pytest.raises(Board.DoesNotExist):
        Pin.objects.get(pin.pk).board  # noqa: B018  # the access raises


def test_a_reference_may_be_assigned_after_it_was_none() -> None:
    board = on(Board, 3, name="b")
    pin = on(Pin, 5, board=board)
    clone = copy.copy(pin)
    clone.board = None
    assert (clone.board, pin.board) == (None, board)
    clone.board_id = board.pk
    assert clone.board == board


@isolate_apps("tests.pinboards")
def test_references_and_mappings_to_a_proxy_take_objects_of_its_table() -> None:
    class ProxyBoard(Board):
        class Meta:
            proxy = True
            app_label = "pinboards"

    class ProxyPin(ShardedObject):
        board = fields.Ref(ProxyBoard)

        class Meta:
            app_label = "pinboards"

        class ObjectMeta:
            group = "pins"
            type_id = 98

    board, other = on(Board, 3, name="b"), on(User, 3, name="u")
    assert ProxyPin(board=board).board is board
    assert type(ProxyPin(board_id=board.pk).board) is ProxyBoard
    assert id_of(ProxyBoard, board) == board.pk
    with pytest.raises(WrongObjectType):
        ProxyPin(board=other)


def test_a_change_of_a_dict_of_values_does_not_change_the_object() -> None:
    row = on(Everything, 1, tags=["a"])
    row.to_dict()["tags"].append("b")
    assert row.tags == ["a"]


@isolate_apps("tests.pinboards")
def test_a_class_removes_fields_of_its_abstract_base() -> None:
    class Base(ShardedObject):
        title = fields.Text()
        board = fields.Ref(Board)
        note = fields.Text()

        class Meta:
            abstract = True
            app_label = "pinboards"

    attrs = {"title": None, "board": None, "note": fields.Integer()}
    app, meta = type("Meta", (), {"app_label": "pinboards"}), type("ObjectMeta", (), MADE)
    cls: Any = type(ShardedObject)(
        "Derived", (Base,), {"__module__": __name__, "Meta": app, "ObjectMeta": meta, **attrs}
    )
    assert [(field.name, type(field)) for field in cls.body_fields()] == [("note", fields.Integer)]
    assert cls(note=5).to_dict() == {"id": None, "note": 5}


@isolate_apps("tests.pinboards")
def test_wrong_declarations_are_refused() -> None:
    with pytest.raises(InvalidObjectType, match="unique"):
        fields.Text(unique=True)
    former: Any = None
    with pytest.raises(InvalidObjectType, match="'was' of Text is None"):
        fields.Text(was=former)
    for coder in ({"encoder": DjangoJSONEncoder}, {"decoder": json.JSONDecoder}):
        with pytest.raises(InvalidObjectType, match="does not take 'encoder'"):
            fields.JSON(**coder)
    for attrs, message in [
        ({"data": fields.Text()}, "'data'"),
        ({"near": fields.Text()}, "'near'"),
        ({"edit": fields.Text()}, "'edit'"),
        ({"a": fields.Ref(Board), "a_id": fields.Text()}, "attribute 'a_id'"),
        ({"a_id": fields.Text(), "a": fields.Ref(Board)}, "attribute 'a_id'"),
        ({"a": fields.Text(), "b": fields.Text(was="a")}, r"\['a'\] more than once"),
        ({"a": fields.Text(was="c"), "b": fields.Text(was="c")}, r"\['c'\] more than once"),
        ({"a": fields.Text(), "ObjectMeta": type("M", (), {**MADE, "removed": "a"})}, r"\['a'\]"),
        ({"ObjectMeta": type("ObjectMeta", (), {"group": "pins"})}, "type_id"),
        ({"ObjectMeta": type("ObjectMeta", (), {"grop": 1})}, "grop"),
        ({"ObjectMeta": type("M", (), {**MADE, "removed": None})}, "removed is None"),
        ({"ObjectMeta": type("M", (), {**MADE, "removed": [1]})}, r"removed is \[1\]"),
        ({"ObjectMeta": type("M", (), {**MADE, "max_body": "1 MB"})}, "max_body is '1 MB'"),
        ({"ObjectMeta": type("M", (), {**MADE, "max_body": 0})}, "max_body is 0"),
        ({"slug": models.SlugField()}, r"columns for \['slug'\]"),
    ]:
        meta = type("ObjectMeta", (), MADE)
        app = type("Meta", (), {"app_label": "pinboards"})
        with pytest.raises(InvalidObjectType, match=message):
            type(ShardedObject)(
                "Wrong", (ShardedObject,),
                {"__module__": __name__, "Meta": app, "ObjectMeta": meta, **attrs},
            )  # fmt: skip


@isolate_apps("tests.pinboards")
def test_checks_look_at_fields_of_the_body_and_at_references() -> None:
    class WrongPin(ShardedObject):
        board = fields.Ref("pinboards.Nothing")
        price = fields.Decimal()

        class Meta:
            app_label = "pinboards"

        class ObjectMeta:
            group = "pins"
            type_id = 98

    class LostMapping(Mapping):
        source, target = WrongPin, "Nothing"

        class Meta:
            app_label = "pinboards"

    class PinsByAddress(ObjectLookup):
        target = WrongPin

        class Meta:
            app_label = "pinboards"

        class LookupMeta:
            group = "pins"

    config = WrongPin._meta.apps.get_app_config("pinboards")
    found = [(message.obj, message.id) for message in check_objects([config])]
    price, board = WrongPin._meta.get_field("price"), WrongPin._meta.get_field("board")
    assert (board, "sharded_orm_objects.E001") in found
    assert {name for obj, name in found if obj is price} == {"fields.E130", "fields.E132"}
    assert (LostMapping, "sharded_orm_objects.E001") in found
    assert (PinsByAddress, "sharded_orm_objects.E002") in found
