"""Mappings: order, cursors, full pages, sides, cycles, the cache."""

from __future__ import annotations

import random
from typing import Any

import pytest
from django.db import connections, models
from django.db.migrations.state import ModelState
from django.test.utils import CaptureQueriesContext, isolate_apps
from django.utils.translation import gettext_lazy

from sharded_orm import cache_scope
from sharded_orm.contrib.objects import Cursor, Mapping, MirrorMapping, ObjectLookup
from sharded_orm.contrib.objects.exceptions import (
    InvalidCursor,
    InvalidObjectType,
    InvalidPageSize,
    InvalidValue,
    ObjectWriteRefused,
    WrongObjectType,
)
from sharded_orm.exceptions import InvalidID
from tests.integration.objects.conftest import DATABASES, LaterClock, on, set_body
from tests.pinboards.models import Board, BoardPins, Follows, Pin, User

pytestmark = pytest.mark.django_db(databases=DATABASES)


@pytest.fixture
def board(db: None) -> Board:
    return on(Board, 6, name="Cats")


@pytest.fixture
def pins(board: Board) -> list[Pin]:
    """Twelve pins of the board on all shards, each two at one position."""
    pins = [on(Pin, n % 8, board=board, note=str(n)) for n in range(12)]
    for number, pin in enumerate(pins):
        assert BoardPins.objects.add(board, pin, sequence=number // 2)
    return sorted(pins, key=lambda pin: (int(pin.note) // 2, pin.pk))


def pages(size: int, **how: Any) -> list[list[Any]]:
    board = how.pop("board")
    cursor, result = None, []
    while True:
        page = BoardPins.objects.page(board, after=cursor, size=size, **how)
        result.append(page.objects)
        if page.next is None:
            return result
        assert len(page) == size
        cursor = str(page.next)


@pytest.mark.every_backend
@pytest.mark.parametrize("size", [1, 4, 5, 12, 50])
def test_pages_in_both_directions(board: Board, pins: list[Pin], size: int) -> None:
    for newest_first, wanted in ((False, pins), (True, pins[::-1])):
        read = pages(size, board=board, newest_first=newest_first)
        assert [pin for page in read for pin in page] == wanted
        assert [len(page) for page in read[:-1]] == [size] * (len(read) - 1)
        assert read[-1]


@pytest.mark.every_backend
def test_pages_are_full_although_objects_are_deleted_purged_or_damaged(
    board: Board, pins: list[Pin]
) -> None:
    for pin in pins[1:4]:
        pin.delete()
    pins[5].purge()
    set_body(pins[7], "[]")
    page = BoardPins.objects.page(board, size=3)
    assert page.objects == [pins[0], pins[4], pins[6]]
    rest = BoardPins.objects.page(board, after=page.next, size=4)
    assert (rest.objects, rest.next) == (pins[8:], None)
    assert set(page.damaged | rest.damaged) == {pins[7].pk}
    assert BoardPins.objects.count(board) == 12
    for pin in pins[8:]:
        pin.delete()
    assert BoardPins.objects.page(board, size=3).next is None


def test_no_page_has_an_object_twice_if_it_moves_meanwhile(board: Board, pins: list[Pin]) -> None:
    for pin in pins[1:4]:
        pin.delete()  # So the page is filled up by a second read.
    reads = 0

    def move_before_the_second_read(execute: Any, sql: str, *arguments: Any) -> Any:
        nonlocal reads
        if sql.startswith("SELECT") and "boardpins" in sql:
            reads += 1
            if reads == 2:
                assert BoardPins.objects.move(board, pins[0], 2)
        return execute(sql, *arguments)

    with connections["pins_00006"].execute_wrapper(move_before_the_second_read):
        page = BoardPins.objects.page(board, size=3)
    assert page.objects == [pins[0], pins[4], pins[5]]


def test_a_page_ends_where_its_last_object_was_found(board: Board, pins: list[Pin]) -> None:
    """An object that comes back and moves meanwhile is not on the next page as well."""
    for pin in pins[1:4]:
        pin.delete()
    back = pins[1]
    size = 2 + sorted([back, *pins[4:6]], key=lambda pin: pin.pk).index(back)
    reads = 0

    def bring_back_before_the_second_read(execute: Any, sql: str, *arguments: Any) -> Any:
        nonlocal reads
        if sql.startswith("SELECT") and "boardpins" in sql:
            reads += 1
            if reads == 2:
                with back.edit():
                    back.active = True
                assert BoardPins.objects.move(board, back, 2)
        return execute(sql, *arguments)

    with connections["pins_00006"].execute_wrapper(bring_back_before_the_second_read):
        page = BoardPins.objects.page(board, size=size)
    assert page.objects[-1] == back
    rest = BoardPins.objects.page(board, after=page.next).objects
    assert len({*page, *rest}) == len(page) + len(rest) == 10


@pytest.mark.every_backend
def test_cursors_are_stable_when_entries_are_added_moved_and_removed(
    board: Board, pins: list[Pin]
) -> None:
    page = BoardPins.objects.page(board, size=5)
    assert page.objects == pins[:5]
    early, tie = (on(Pin, 2, board=board, note=note) for note in ("early", "tie"))
    BoardPins.objects.add(board, early, sequence=-7)
    BoardPins.objects.add(board, tie, sequence=page.next.sequence)
    BoardPins.objects.remove(board, pins[4])  # the last of the page
    BoardPins.objects.move(board, pins[0], sequence=100)
    rest = BoardPins.objects.page(board, after=page.next)
    behind = [tie] if tie.pk > pins[4].pk else []
    assert [p for p in rest if p != tie] == [*pins[5:], pins[0]]
    assert [p for p in rest if p == tie] == behind


def test_random_histories_are_those_of_a_sorted_list(board: Board, pins: list[Pin]) -> None:
    draw = random.Random(20)
    entries = {pin.pk: int(pin.note) // 2 for pin in pins}
    for _ in range(60):
        pin, sequence = draw.choice(pins), draw.randrange(-3, 9)
        action = draw.choice(["add", "remove", "move"])
        known = pin.pk in entries
        if action == "add":
            assert BoardPins.objects.add(board, pin, sequence) is not known
            entries.setdefault(pin.pk, sequence)
        elif action == "remove":
            assert BoardPins.objects.remove(board, pin.pk) is known
            entries.pop(pin.pk, None)
        else:
            assert BoardPins.objects.move(board, pin, sequence) is known
            if known:
                entries[pin.pk] = sequence
        assert BoardPins.objects.contains(board, pin) is (pin.pk in entries)
    wanted = sorted(entries, key=lambda pk: (entries[pk], pk))
    assert [pin.pk for page in pages(3, board=board) for pin in page] == wanted
    assert BoardPins.objects.count(board) == len(wanted)


@pytest.mark.every_backend
def test_entries_are_on_the_shard_of_the_source_in_the_order_of_their_addition() -> None:
    board = on(Board, 6, name="b")
    pins = [on(Pin, 7 - n, board=board) for n in range(4)]
    for pin in pins:
        assert BoardPins.objects.add(board, pin)
    assert not BoardPins.objects.add(board, pins[0])
    assert {entry._state.db for entry in BoardPins.objects.filter(source_id=board.pk)} == {
        "pins_00006"
    }
    assert BoardPins.objects.page(board).objects == pins


def test_the_sides_of_an_entry_never_change(board: Board, pins: list[Pin]) -> None:
    new = on(Pin, 1, board=board)
    entry = BoardPins.objects.filter(source_id=board.pk).first()
    entry.target_id = new.pk
    for write in (
        entry.save,
        lambda: BoardPins.objects.filter(source_id=board.pk).update(target_id=new.pk),
    ):
        with pytest.raises(ObjectWriteRefused, match="never change"):
            write()
    assert not BoardPins.objects.contains(board, new)
    BoardPins.objects.bulk_create([BoardPins(source_id=board.pk, target_id=new.pk, sequence=-1)])
    assert BoardPins.objects.contains(board, new)
    assert BoardPins.objects.page(board, size=1).objects == [new]


def test_sides_of_a_wrong_type_are_refused(board: Board, pins: list[Pin]) -> None:
    for source, target in [(pins[0], pins[1]), (board, board), (board.pk, board.pk)]:
        for write in (BoardPins.objects.add, BoardPins.objects.remove, BoardPins.objects.contains):
            with pytest.raises(WrongObjectType):
                write(source, target)
    entry = BoardPins(source_id=board.pk, target_id=board.pk, sequence=1)
    for write in (entry.save, lambda: BoardPins.objects.bulk_create([entry])):
        with pytest.raises(WrongObjectType):
            write()
    for sequence in (1 << 63, -(1 << 63) - 1):
        for write in (BoardPins.objects.add, BoardPins.objects.move):
            with pytest.raises(InvalidValue, match="position"):
                write(board, on(Pin, 1, board=board), sequence)
    with pytest.raises(WrongObjectType, match="no id yet"):
        BoardPins.objects.add(Board(name="new"), pins[0])
    with pytest.raises(InvalidID):
        BoardPins.objects.count("cats")
    text: Any
    for text in ("", "1", "x.y", "1.2.3", f"1.{1 << 64}", 5, (1, 2)):
        with pytest.raises(InvalidCursor):
            BoardPins.objects.page(board, after=text)
    size: Any
    for size in (0, 1000, "50", None, 2.5):
        with pytest.raises(InvalidPageSize):
            BoardPins.objects.page(board, size=size)
    assert Cursor.parse(str(Cursor(-5, 7))) == Cursor(-5, 7)


@pytest.mark.every_backend
def test_mappings_may_form_cycles() -> None:
    users = [on(User, n, name=str(n)) for n in range(3)]
    for number, user in enumerate(users):
        Follows.objects.add(user, users[(number + 1) % 3])
        Follows.objects.add(user, user)
    for number, user in enumerate(users):
        assert Follows.objects.page(user).objects == [users[(number + 1) % 3], user]


@pytest.mark.every_backend
def test_a_page_costs_one_read_of_entries_and_one_of_objects(board: Board, pins: list[Pin]) -> None:
    with CaptureQueriesContext(connections["pins_00006"]) as captured:
        BoardPins.objects.page(board, size=5)
    entries = [q for q in captured if "boardpins" in q["sql"]]
    assert len(entries) == 1


@pytest.mark.django_db(databases=DATABASES, transaction=True)
def test_lists_of_a_mapping_are_cached_and_never_stale(later: LaterClock) -> None:
    users = [on(User, n % 8, name=str(n)) for n in range(6)]
    ada = users[0]
    for user in users[1:4]:
        Follows.objects.add(ada, user)
    Follows.objects.page(users[5])
    User.objects.get_many(user.pk + 1000 for user in users)
    Follows.objects.filter(source_id=ada.pk, pk=ada.pk).first()
    later.ahead += 60

    def page() -> tuple[list[Any], int]:
        with CaptureQueriesContext(connections[ada._state.db]) as captured:
            objects = Follows.objects.page(ada, size=10).objects
        return objects, len([q for q in captured if "follows" in q["sql"]])

    for _ in range(2):
        page()
    assert page() == (users[1:4], 0)
    Follows.objects.add(ada, users[4])
    users[2].delete()
    assert page()[0] == [users[1], users[3], users[4]]
    Follows.objects.remove(ada, users[1])
    Follows.objects.move(ada, users[3], sequence=1 << 60)
    assert page()[0] == [users[4], users[3]]


@pytest.mark.django_db(databases=DATABASES, transaction=True)
def test_pages_of_one_request_see_its_writes_and_conditions_of_managers(later: LaterClock) -> None:
    users = [on(User, n % 8, name=str(n)) for n in range(5)]
    ada = users[0]
    for sequence, user in enumerate(users[1:4]):
        Follows.objects.add(ada, user, sequence)

    class LateManager(type(Follows.objects)):  # type: ignore[misc]  # the class is computed
        def get_queryset(self) -> Any:
            return super().get_queryset().filter(sequence__gt=0)

    late = LateManager()
    late.model = Follows
    later.ahead += 60
    for _ in range(3):
        with cache_scope():
            for _ in range(2):
                assert Follows.objects.page(ada, size=2).objects == users[1:3]
                assert Follows.objects.page(ada, newest_first=True).objects == users[3:0:-1]
                assert late.page(ada).objects == users[2:4]
            Follows.objects.add(ada, users[4], -1)
            assert Follows.objects.page(ada, size=2).objects == [users[4], users[1]]
            users[1].delete()
            assert Follows.objects.page(ada, size=2).objects == [users[4], users[2]]
            with users[1].edit():
                users[1].active = True
            assert Follows.objects.page(ada).objects == [users[4], *users[1:4]]
            Follows.objects.remove(ada, users[4])


@pytest.mark.every_backend
def test_uncached_lists_of_a_cached_mapping_are_read_by_a_plan() -> None:
    users = [on(User, n, name=str(n)) for n in range(4)]
    ada = users[0]
    for sequence, user in enumerate(users[1:]):
        Follows.objects.add(ada, user, sequence)

    def newest() -> Any:
        return Follows.objects.uncached().filter(source_id=ada.pk).order_by("-sequence")[:2]

    for last in range(1, 4):
        assert [entry.target_id for entry in newest()] == [users[3].pk, users[2].pk]
        before = Follows.objects.filter(source_id=ada.pk, sequence__lt=last).uncached()
        assert [entry.sequence for entry in before.order_by("sequence")] == list(range(last))
    assert newest()._recording.shape.plans["rows"] is not None


@pytest.mark.every_backend
def test_pages_behind_a_cursor_are_read_by_a_plan(board: Board, pins: list[Pin]) -> None:
    for newest_first, wanted in ((False, pins), (True, pins[::-1])):
        for number, pin in enumerate(wanted):
            cursor = Cursor(int(pin.note) // 2, pin.pk)
            page = BoardPins.objects.page(board, after=cursor, size=50, newest_first=newest_first)
            assert page.objects == wanted[number + 1 :]
        entries = BoardPins.objects._after(board.pk, cursor, newest_first)
        read = entries.values_list("sequence", "target_id")[:1]
        assert read._recording.shape.plans["rows"] is not None


@isolate_apps("tests.pinboards")
def test_a_mapping_with_a_meta_of_its_own_has_the_index_of_its_pages() -> None:
    class AbstractPins(Mapping):
        source, target = Board, Pin

        class Meta:
            abstract = True

    class NamedPins(AbstractPins):
        class Meta:
            app_label = "pinboards"
            indexes = (models.Index(fields=["sequence"], name="by_sequence"),)

    class OtherPins(AbstractPins):
        class Meta(AbstractPins.Meta):
            app_label = "pinboards"

    paging = ["source_id", "sequence", "target_id"]
    assert [index.fields for index in NamedPins._meta.indexes] == [["sequence"], paging]
    assert [index.fields for index in OtherPins._meta.indexes] == [paging]
    assert [index.fields for index in BoardPins._meta.indexes] == [paging]


def test_wrong_declarations_are_refused() -> None:
    for attrs, message in [
        ({"source": Board}, "target must be"),
        ({"source": int, "target": Pin}, "source must be"),
        ({"source": "pinboards.Board", "target": Pin}, "group"),
        ({"source": Board, "target": Pin, "MappingMeta": type("M", (), {"sort": 1})}, "sort"),
    ]:
        app = type("Meta", (), {"app_label": "pinboards"})
        with pytest.raises(InvalidObjectType, match=message):
            type(BoardPins)(
                "Wrong", (BoardPins.__mro__[1],), {"__module__": __name__, "Meta": app, **attrs}
            )


def test_wrong_declarations_beside_mappings_are_refused() -> None:
    parts = {"__module__": __name__, "Meta": type("Meta", (), {"app_label": "pinboards"})}
    for base, attrs, message in [
        (MirrorMapping, {"mapping": Pin}, "mapping must be a class that derives from Mapping"),
        (ObjectLookup, {"target": int}, "target must be a class of objects"),
        (Pin, {}, "derives from Pin, which has a table of its own"),
        (BoardPins, {}, "derives from BoardPins, which has a table of its own"),
    ]:
        with pytest.raises(InvalidObjectType, match=message):
            type(base)("Wrong", (base,), {**parts, **attrs})


@isolate_apps("tests.pinboards")
def test_a_name_that_is_a_plural_gets_no_other_s() -> None:
    def plural(base: Any = Mapping, name: str = "BoardPins", **options: Any) -> str:
        sides = {"source": Board, "target": Pin} if base is Mapping else {}
        meta = type("Meta", (), {"app_label": "pinboards", **options})
        model = type(name, (base,), {"__module__": __name__, "Meta": meta, **sides})
        stored = ModelState.from_model(model).options
        assert ("verbose_name_plural" in stored) == ("verbose_name_plural" in options)
        return str(model._meta.verbose_name_plural)

    assert plural() == "board pins"
    assert plural(name="BoardPin") == "board pins"
    assert plural(name="First", verbose_name="pins of boards") == "pins of boards"
    assert plural(name="Second", verbose_name=gettext_lazy("pins")) == "pinss"
    assert plural(name="Others", verbose_name_plural="pinned") == "pinned"
    mirror = type(
        "PinBoards",
        (MirrorMapping,),
        {
            "__module__": __name__,
            "mapping": BoardPins,
            "Meta": type("Meta", (), {"app_label": "pinboards"}),
        },
    )
    assert mirror._meta.verbose_name_plural == "pin boards"
    proxy = type(
        "Names",
        (BoardPins,),
        {
            "__module__": __name__,
            "Meta": type("Meta", (), {"app_label": "pinboards", "proxy": True}),
        },
    )
    assert proxy._meta.verbose_name_plural == "names"
