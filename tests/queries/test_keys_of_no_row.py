"""Keys and ids that no row can have: reads give the result of Django on one database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.core.exceptions import ObjectDoesNotExist
from django.db import connections
from django.db.models import Q

from sharded_orm.exceptions import InvalidShardKey
from sharded_orm.ids.layout import PACKED, PackedID
from tests.photos.models import Board, Event, Like, Note, Person, Photo, Pin, Reading, Save, Visit
from tests.queries.conftest import DATABASES

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

#: Below and above the range of a column; ids of a shard that does not exist; no ids at all.
ODD: list[Any] = [
    -1, 0, 1, -(1 << 63), -(1 << 63) - 1, (1 << 63) - 1, 1 << 63, 1 << 70, 10**400,
    PACKED.pack(999, 1, 1), 4 << 10, "-1", "7", " 7 ", 7.9, True, None, "", "seven", object(), [1],
]  # fmt: skip
FITTING = [v for v in ODD if type(v) is int and -(1 << 63) <= v < 1 << 63]

FORMS: dict[str, Callable[[Any, str, Any], Any]] = {
    "get": lambda rows, name, value: rows.get(**{name: value}),
    "filter": lambda rows, name, value: list(rows.filter(**{name: value})),
    "count": lambda rows, name, value: rows.filter(**{name: value}).count(),
    "exists": lambda rows, name, value: rows.filter(**{name: value}).exists(),
    "first": lambda rows, name, value: rows.filter(**{name: value}).first(),
    "Q": lambda rows, name, value: list(rows.filter(Q(**{name: value}) | Q(**{name: -5}))),
    "in": lambda rows, name, value: list(rows.filter(**{f"{name}__in": [value]})),
    "update": lambda rows, name, value: rows.filter(**{name: value}).update(**CHANGES[rows.model]),
    "delete": lambda rows, name, value: rows.filter(**{name: value}).delete()[0],
}
CHANGES: dict[Any, dict[str, Any]] = {
    Person: {"username": "x"},
    Pin: {"note": "x"},
    Board: {"name": "x"},
    Save: {"note": "x"},
    Like: {"save_of": None},
    Visit: {"page": "x"},
    Reading: {"value": 1.0},
    Photo: {"title": "x"},
}

keys = pytest.mark.parametrize(
    ("model", "name"),
    [
        (Pin, "pk"), (Board, "pk"), (Save, "pk"), (Save, "board_id"), (Save, "board__pk"), (Like, "save_of_id"),
        (Visit, "pk"), (Reading, "sensor"), (Photo, "user_id"),
    ],
)  # fmt: skip


def outcome(run: Callable[[Any, str, Any], Any], rows: Any, name: str, value: Any) -> Any:
    """Return the result, or the class of the error, which callers catch."""
    try:
        return run(rows, name, value)
    except ObjectDoesNotExist:
        return "does not exist"
    except Exception as exc:  # any error of Django's
        return type(exc)


@keys
@pytest.mark.parametrize("form", FORMS)
def test_no_row_is_what_django_finds_on_one_database(model: Any, name: str, form: str) -> None:
    may_be_null = model is Like
    for value in ODD:
        if value is None and may_be_null:
            continue  # on any shard: it is not refused for its value
        expected = outcome(FORMS[form], Person.objects, "pk", value)
        found = outcome(FORMS[form], model.objects, name, value)
        # SQLite refuses such a number in a list, and Django leaves that to SQLite.
        assert found == expected or (expected is OverflowError and found == []), value


def test_among_other_ids_they_take_nothing_away() -> None:
    boards = [Board.objects.using(alias).create(name="b") for alias in ("pins_00001", "pins_00004")]
    ids = [board.pk for board in boards]
    saves = [Save.objects.create(board=board, note="s") for board in boards]
    for odd in FITTING:
        assert set(Board.objects.filter(pk__in=[odd, *ids])) == set(boards)
        assert set(Board.objects.filter(Q(pk=odd) | Q(pk__in=ids))) == set(boards)
        assert list(Board.objects.filter(pk__in=[odd, ids[0]])) == boards[:1]
        assert set(Board.objects.in_bulk([odd, *ids])) == set(ids)
        assert set(Save.objects.filter(board__in=[odd, *ids])) == set(saves)
        assert list(Board.objects.filter(pk=ids[0]).exclude(pk=odd)) == boards[:1]
        assert not Board.objects.filter(pk=ids[0]).filter(pk=odd).exists()
        assert Board.objects.filter(pk__in=[odd, ids[0]]).update(name=f"{odd}") == 1


def test_an_instance_that_no_row_can_be() -> None:
    for odd in (-1, PACKED.pack(999, 1, 1)):
        stray = Board(pk=odd, name="x")
        assert list(Save.objects.filter(board=stray)) == []
        assert list(stray.saves.all()) == []
        assert stray not in Board.objects.filter(pk=odd)


def test_the_id_may_come_as_parts() -> None:
    with pytest.raises(Board.DoesNotExist):
        Board.objects.get(pk=PackedID(999, 1, 1))


def test_why_nothing_is_found_is_told_on_request() -> None:
    explanation = str(Board.objects.filter(pk=-1).explain_routing())
    assert "no shard" in explanation and "-1" in explanation


@pytest.mark.parametrize("odd", [-1, PACKED.pack(999, 1, 1), 1 << 63])
def test_writing_them_is_refused(odd: int) -> None:
    board = Board.objects.using("pins_00001").create(name="b")
    for write in (
        lambda: Board.objects.create(pk=odd, name="x"),
        lambda: Board(pk=odd, name="x").save(),
        lambda: Board.objects.bulk_create([Board(pk=odd, name="x"), Board(name="y")]),
        lambda: Board.objects.get_or_create(pk=odd),
        lambda: Board.objects.update_or_create(pk=odd),
        lambda: Board(pk=odd).delete(),
        lambda: Save.objects.create(board_id=odd, note="x"),
        lambda: Save.objects.bulk_create([Save(board_id=odd, note="x")]),
        lambda: Save.objects.get_or_create(board_id=odd, note="x"),
        # The id of the row is generated; the board decides the shard, and names none.
        lambda: Note.objects.create(board_id=odd, text="x"),
        lambda: Note.objects.bulk_create([Note(board_id=odd, text="x"), Note(board=board)]),
    ):
        with pytest.raises(InvalidShardKey, match=str(odd)):
            write()
    assert [Board.objects.scatter().count(), Save.objects.scatter().count()] == [1, 0]
    assert Note.objects.scatter().count() == 0


@pytest.mark.parametrize("sensor", [-1, 4000])
def test_a_key_outside_the_ranges_is_not_written(sensor: int) -> None:
    for write in (
        lambda: Reading.objects.create(sensor=sensor, value=1),
        lambda: Reading.objects.bulk_create([Reading(sensor=sensor, value=1)]),
    ):
        with pytest.raises(InvalidShardKey, match="up to 4000"):
            write()


def test_text_that_no_row_has() -> None:
    # PostgreSQL refuses NUL in a text, and Django leaves that to PostgreSQL.
    nul = [] if connections["events_00000"].vendor == "postgresql" else ["\0"]
    for text in ("", *nul, "x" * 1000, "'", "%", "🦆"):
        assert not Event.objects.filter(account=text).exists()
