"""Objects: ids, versions, edits, deletion and purging, batches, the cache."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core import serializers
from django.core.management import call_command
from django.db import IntegrityError, NotSupportedError, connections, transaction
from django.db.models import ProtectedError, Q
from django.db.models.deletion import Collector
from django.db.models.signals import post_save
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from sharded_orm import uncached
from sharded_orm.cache.requests import RowAddress
from sharded_orm.contrib.objects import object_queryset
from sharded_orm.contrib.objects.body_column import VersionColumn
from sharded_orm.contrib.objects.exceptions import (
    ConcurrentEdit,
    InvalidValue,
    ObjectWriteRefused,
    UnsavedChanges,
    UnstoredObject,
    WrongObjectType,
)
from sharded_orm.contrib.objects.object_queryset import ObjectQuerySet
from sharded_orm.exceptions import CrossShardRelation, InvalidID, ShardKeyRequired
from sharded_orm.ids.layout import PACKED, PackedID
from sharded_orm.models import ShardedQuerySet
from sharded_orm.models.cached import lookup_plan, queryset
from sharded_orm.models.cached.bulk_read import read_together, reads_by_pk
from sharded_orm.models.cached.lookup_plan import plan_of
from sharded_orm.scatter.execute import Executor
from tests.integration.objects.conftest import DATABASES, LaterClock, on, refused
from tests.pinboards.models import (
    Board,
    BoardPins,
    Everything,
    FacebookUsers,
    Label,
    Pin,
    Shelf,
    User,
)

pytestmark = pytest.mark.django_db(databases=DATABASES)


@pytest.mark.every_backend
def test_an_id_tells_shard_and_type_and_needs_no_key() -> None:
    board = on(Board, 5, name="b")
    pin = Pin.objects.create(near=board, board=board)
    ids = [PackedID.from_int(row.pk) for row in (board, pin)]
    assert [(parts.shard, parts.type) for parts in ids] == [(5, 21), (5, 22)]
    for ask in ({"pk": board.pk}, {"id": str(board.pk)}, {"pk": board.pk, "version": 1}):
        assert Board.objects.get(**ask).name == "b"
    conditions = (Q(pk=board.pk), ("pk", board.pk))
    for value in (board.pk, str(board.pk), *conditions):
        assert Board.objects.get(value) == board
    for rows in (
        Board.objects.all(),
        Board.objects.with_deleted(),
        Board.objects.filter(version=1),
    ):
        assert rows.get(board.pk) == rows.get(str(board.pk), version=1) == board
        assert all(rows.get(condition) == board for condition in conditions)
        with pytest.raises(Board.DoesNotExist):
            rows.get(board.pk, version=2)
        with pytest.raises(WrongObjectType, match="type 21"):
            Pin.objects.with_deleted().get(board.pk)
        with pytest.raises(InvalidID):
            rows.get("x")
    board.delete()
    assert Board.objects.with_deleted().get(board.pk) == board
    with pytest.raises(Board.DoesNotExist):
        Board.objects.all().get(board.pk)


def test_coroutines_check_ids_as_well() -> None:
    board = on(Board, 5, name="b")

    async def read(cls: Any, value: Any) -> Any:
        return await cls.objects.aget(value)

    assert async_to_sync(read)(Board, board.pk) == board
    with pytest.raises(WrongObjectType):
        async_to_sync(read)(Pin, board.pk)


@pytest.mark.every_backend
def test_ids_of_another_type_or_shard() -> None:
    # The published vector (P1).
    assert PackedID.from_int(241294492511762325) == PackedID(3429, 1, 7075733)
    assert PACKED.pack(3429, 1, 7075733) == 241294492511762325
    board = on(Board, 2, name="b")
    for cls in (Pin, User):
        with pytest.raises(WrongObjectType, match="type 21"):
            cls.objects.get(board.pk)
        with pytest.raises(WrongObjectType):
            cls.objects.get_many([board.pk])
    with pytest.raises(WrongObjectType, match="type 1"):
        Board.objects.get(241294492511762325)
    for value in (-1, 1 << 63, None, 1.5, "x", "9" * 5000, board):
        for read in (lambda pk: Board.objects.get(pk=pk), Board.objects.get):
            with pytest.raises(InvalidID):
                read(value)
    elsewhere = [PACKED.pack(shard, 21, PackedID.from_int(board.pk).local) for shard in (3, 500)]
    for pk in elsewhere:
        with pytest.raises(Board.DoesNotExist):
            Board.objects.get(pk)
    assert Board.objects.get_many(elsewhere) == {}
    with refused(CrossShardRelation):
        on(Board, 2, id=elsewhere[0], name="wrong")


@pytest.mark.every_backend
def test_edit_locks_saves_and_counts() -> None:
    pin = on(Pin, 1, board=on(Board, 1, name="b"), note="a")
    other = Pin.objects.get(pin.pk)
    with pin.edit() as same:
        assert same is pin
        pin.note = "b"
    assert (pin.version, Pin.objects.get(pin.pk).note) == (2, "b")
    with other.edit():  # reads the present values first
        assert other.note == "b"
        other.link = "https://example.org/"
    assert Pin.objects.get(pin.pk).to_dict() == other.to_dict()


def test_an_error_in_edit_saves_nothing_and_restores_the_instance() -> None:
    pin = on(Pin, 1, board=on(Board, 1, name="b"), note="a")
    with pytest.raises(KeyError), pin.edit():
        pin.note = "b"
        raise KeyError
    assert pin.note == Pin.objects.get(pin.pk).note == "a"
    with pin.edit():
        pin.note = "c"
    assert Pin.objects.get(pin.pk).note == "c"
    pin.note = "d"
    with pytest.raises(UnsavedChanges, match="note"), pin.edit():
        pass
    with pytest.raises(UnsavedChanges, match="not stored yet"), Board().edit():
        pass


@pytest.mark.every_backend
def test_an_object_is_purged_or_deleted_inside_of_edit() -> None:
    boards = [on(Board, n, name="b") for n in range(3)]
    pks = [board.pk for board in boards]
    with boards[0].edit():
        boards[0].purge()
    with boards[1].edit():
        boards[1].delete()
    with pytest.raises(Undo), boards[2].edit():
        boards[2].purge()
        raise Undo
    assert [board.pk for board in boards] == [None, *pks[1:]]
    assert list(Board.objects.get_many(pks)) == pks[2:]
    assert set(Board.objects.with_deleted().in_bulk(pks)) == set(pks[1:])
    with pytest.raises(ShardKeyRequired), boards[2].edit():
        boards[2].pk = None


def test_an_edit_inside_of_another_one() -> None:
    board = on(Board, 1, name="a")
    with board.edit(), board.edit():
        board.name += "b"
    with pytest.raises(Undo), board.edit():
        with board.edit():
            board.name += "c"
        raise Undo
    with board.edit():
        board.name += "d"
        with pytest.raises(UnsavedChanges), board.edit():
            pass
    assert board.name == Board.objects.get(board.pk).name == "abd"
    other = Board.objects.get(board.pk)
    with refused(ConcurrentEdit), board.edit():
        board.name = "e"
        with other.edit():
            other.name = "f"
    assert Board.objects.get(board.pk).name == "abd"


def test_a_copy_of_an_instance_has_values_of_its_own() -> None:
    row = on(Everything, 1, text="a", tags=["a"])
    for clone in (copy.copy(row), copy.deepcopy(row), pickle.loads(pickle.dumps(row))):
        clone.text = "b"
        clone.tags.append("b")
        assert (row.text, row.tags) == ("a", ["a"])
        clone.pk, clone._state.adding = None, True
        clone.save()
        assert Everything.objects.get(clone.pk).tags == ["a", "b"]
    with row.edit():
        row.number += 1
    assert Everything.objects.get(row.pk).text == "a"


@pytest.mark.every_backend
def test_save_compares_the_version() -> None:
    pin = on(Pin, 1, board=on(Board, 1, name="b"), note="a")
    first, second = Pin.objects.get(pin.pk), Pin.objects.get(pin.pk)
    first.note = "first"
    first.save()
    first.note = "again"
    first.save(update_fields=["note"])
    second.link = "https://example.org/"
    with refused(ConcurrentEdit, match="version 1"):
        second.save()
    for _ in range(2):  # it fails each time, not only once
        with refused(ConcurrentEdit):
            second.save(update_fields=["link"])
    read = Pin.objects.get(pin.pk)
    assert (read.note, read.link, read.version) == ("again", None, 3)
    for rows in (Pin.objects.only("data"), Pin.objects.defer("ts")):
        partly = rows.get(pk=pin.pk)
        partly.note = "x"
        with refused(ConcurrentEdit, match="without its version"):
            partly.save()
    pin.purge()
    with refused(ConcurrentEdit):
        read.save()


class Undo(Exception):
    pass


@pytest.mark.every_backend
def test_a_version_that_was_rolled_back_is_no_other_version_with_its_number() -> None:
    pin = on(Pin, 1, board=on(Board, 1, name="b"), note="a")
    late = Pin.objects.get(pin.pk)
    late.note = "late"
    with pytest.raises(Undo), transaction.atomic(using="pins"):
        late.save()
        raise Undo
    with pin.edit():
        pin.link = "https://example.org/"
    assert late.version == pin.version == 2
    for names in (None, ["note"]):
        with refused(ConcurrentEdit):
            late.save(update_fields=names)
    assert Pin.objects.get(pin.pk).link == "https://example.org/"
    late.refresh_from_db(fields=["ts"])
    late.note = "again"
    late.save()
    late.save()
    read = Pin.objects.get(pin.pk)
    assert (read.link, read.note, read.version) == ("https://example.org/", "again", 4)


def test_a_receiver_of_post_save_may_save_again() -> None:
    def again(sender: Any, instance: Any, **kwargs: Any) -> None:
        if instance.note != "again":
            instance.note = "again"
            instance.save()

    post_save.connect(again, sender=Pin)
    try:
        pin = on(Pin, 1, board=on(Board, 1, name="b"), note="a")
        with pin.edit():
            pin.note = "b"
    finally:
        post_save.disconnect(again, sender=Pin)
    read = Pin.objects.get(pin.pk)
    assert (read.note, read.version, pin.version) == ("again", 4, 4)


def test_save_of_no_fields_saves_and_forgets_nothing() -> None:
    pin = on(Pin, 1, board=on(Board, 1, name="b"), note="a")
    pin.note = "b"
    pin.save(update_fields=[])
    with pytest.raises(UnsavedChanges, match="note"), pin.edit():
        pass
    assert Pin.objects.get(pin.pk).version == 1


def test_body_and_version_are_read_together() -> None:
    pin = on(Pin, 1, board=on(Board, 1, name="b"), note="a")
    for read in (
        lambda row: row.refresh_from_db(fields=["version"]),
        lambda row: row.refresh_from_db(fields=["note"]),
        lambda row: row.refresh_from_db(),
        lambda row: row.delete(),
    ):
        late = Pin.objects.get(pin.pk)
        with pin.edit():
            pin.note += "b"
        read(late)
        late.link = "https://example.org/"
        late.save()
        assert Pin.objects.with_deleted().get(pk=pin.pk).note == pin.note
        pin.refresh_from_db()
    partly = Pin.objects.with_deleted().only("data").get(pk=pin.pk)
    partly.note = "x"
    with pytest.raises(UnsavedChanges, match="note"):
        partly.version  # noqa: B018  # the access loads it


def test_a_new_object_with_an_id_replaces_no_other() -> None:
    board = on(Board, 1, name="b")
    with refused(IntegrityError):
        Board(id=board.pk, name="other").save()
    with refused(IntegrityError):
        async_to_sync(Board(id=board.pk, name="other").asave)()
    assert Board.objects.get(board.pk).name == "b"
    fixture = serializers.serialize("json", [board])
    with board.edit():
        board.name = "changed"
    for row in serializers.deserialize("json", fixture):
        row.save()
    read = Board.objects.get(board.pk)
    assert (read.name, read.version) == ("b", 1)


@pytest.mark.parametrize("form", ["json", "xml"])
@pytest.mark.django_db(databases=[*DATABASES, "events"])
def test_objects_mappings_and_lookups_are_dumped_and_loaded(form: str, tmp_path: Path) -> None:
    board, user = on(Board, 1, name="<b>"), on(User, 5, name="u")
    pins = [on(Pin, n, board=board, note=str(n)) for n in range(3)]
    for pin in pins:
        BoardPins.objects.add(board, pin)
    pins[1].delete()
    FacebookUsers.objects.claim("4711", user)
    files = {name: str(tmp_path / f"{name}.{form}") for name in ("dump", "all")}
    call_command("dumpdata", "pinboards", format=form, output=files["dump"])
    call_command("dumpdata", "pinboards", "--all", format=form, output=files["all"])
    for name, deleted in (("dump", []), ("all", [pins[1]])):
        for model in (Board, User, Pin):
            model.objects.with_deleted().scatter().purge()
        for table in (BoardPins, FacebookUsers):
            table.objects.scatter().delete()
        call_command("loaddata", files[name], verbosity=0)
        assert BoardPins.objects.page(board).objects == [pins[0], pins[2]]
        assert Pin.objects.get(pins[2].pk).to_dict() == pins[2].to_dict()
        assert FacebookUsers.objects.find("4711") == user
        assert list(Pin.objects.with_deleted().filter(active=False).scatter()) == deleted


def test_statements_that_would_pass_by_the_version_are_refused() -> None:
    board = on(Board, 1, name="b")
    for write in [
        lambda: Board.objects.filter(pk=board.pk).update(active=False),
        lambda: Board.objects.bulk_update([board], ["data"]),
        lambda: Board.objects.bulk_create(
            [board], update_conflicts=True, update_fields=["data"], unique_fields=["id"]
        ),
        lambda: Board.objects.bulk_create([board], None, False, True, ["data"], ["id"]),
    ]:
        with pytest.raises(ObjectWriteRefused):
            write()
    many = Board.objects.bulk_create([Board(name=str(n)) for n in range(5)])
    assert [b.name for b in Board.objects.get_many(b.pk for b in many).values()] == list("01234")


@pytest.mark.django_db(databases=DATABASES, transaction=True)
def test_a_list_with_an_invalid_object_is_not_stored_on_any_shard() -> None:
    rows = [Everything(number=n) for n in range(16)]
    for batch_size in (None, 2):
        with pytest.raises(InvalidValue, match="email"):
            Everything.objects.bulk_create([*rows, Everything(email="nobody")], batch_size)
    assert not Everything.objects.with_deleted().scatter().exists()
    assert not any("_prepared" in row.__dict__ for row in rows)


class LateManager(type(Board.objects)):  # type: ignore[misc]  # the class is computed
    def get_queryset(self) -> Any:
        return super().get_queryset().filter(version__gt=1)


def test_reads_by_id_keep_the_conditions_of_managers() -> None:
    late = LateManager()
    late.model = Board
    boards = [on(Board, n, name="b") for n in range(3)]
    with boards[0].edit():
        boards[0].name = "c"
    for board in boards[:2]:
        board.delete()
    for purge in (lambda: 0, late.purge):
        assert late.get_many(board.pk for board in boards) == {}
        for board in boards:
            with pytest.raises(Board.DoesNotExist):
                late.get(board.pk)
        purge()
    with boards[2].edit():
        boards[2].name = "c"
    assert late.get(boards[2].pk) == late.get_many([boards[2].pk])[boards[2].pk] == boards[2]
    # The deletion has raised the version of both. Each was purged.
    assert set(Board.objects.with_deleted().scatter()) == {boards[2]}


def test_references_and_writes_ignore_the_conditions_of_managers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in Django, which uses _base_manager for them."""
    late = LateManager()
    late.model, late.name = Board, "objects"
    monkeypatch.setattr(Board, "objects", late)
    board, other = (on(Board, n, name="b") for n in (1, 2))
    pin = on(Pin, 1, board=board, note="a", link="https://example.org/")
    pin.full_clean()
    assert Pin.objects.get(pin.pk).board == board
    with pytest.raises(Board.DoesNotExist):
        late.get(board.pk)
    with board.edit():
        board.name = "c"
    assert late.get(board.pk).name == "c"
    other.delete()
    assert not other.active


@pytest.mark.every_backend
def test_deleted_objects_are_not_read_until_they_come_back() -> None:
    board = on(Board, 4, name="b")
    late = Board.objects.get(board.pk)
    assert board.delete() == (1, {"pinboards.Board": 1})
    assert board.delete() == (0, {})
    for read in [
        lambda: Board.objects.get(board.pk),
        lambda: Board.objects.get(pk=board.pk, version=2),
        lambda: late.edit().__enter__(),
    ]:
        with pytest.raises(Board.DoesNotExist):
            read()
    with refused(ConcurrentEdit):
        late.save()
    assert Board.objects.get_many([board.pk]) == {}
    assert not Board.objects.scatter().filter(pk=board.pk).exists()
    assert Board.objects.with_deleted().get(pk=board.pk).active is False
    with board.edit():
        board.active = True
    assert Board.objects.get(board.pk).name == "b"


def test_an_object_that_was_never_stored_is_not_deleted() -> None:
    board = Board(name="b")
    for delete in (board.delete, board.purge):
        with pytest.raises(ValueError, match="never stored") as error:
            delete()
        assert type(error.value) is UnstoredObject


@pytest.mark.every_backend
def test_purge_removes_deleted_objects_for_good() -> None:
    boards = [on(Board, n, name="b") for n in range(4)]
    assert Board.objects.filter(pk__in=[b.pk for b in boards[:2]]).delete()[0] == 2
    between = timezone.now()
    boards[2].delete()
    assert Board.objects.purge(before=between) == 2
    assert Board.objects.purge() == 1
    assert list(Board.objects.with_deleted().scatter()) == [boards[3]]


@pytest.mark.every_backend
def test_no_shard_is_purged_if_an_object_of_another_shard_is_protected() -> None:
    shelves = [on(Shelf, n) for n in range(4)]
    labels = [Label.objects.create(shelf=shelves[n]) for n in (2, 3)]
    for shelf in shelves:
        shelf.delete()
    for purge in (Shelf.objects.purge, Shelf.objects.with_deleted().scatter().purge):
        with pytest.raises(ProtectedError) as error:
            purge()
        assert {row.shelf for row in error.value.protected_objects} == {row.shelf for row in labels}
        assert set(Shelf.objects.with_deleted().scatter()) == set(shelves)
    Label.objects.scatter().delete()
    assert Shelf.objects.purge() == 4


UNDELETABLE: dict[str, Any] = {
    "values": lambda rows: rows.values("id"),
    "values_list": lambda rows: rows.values_list("id", flat=True),
    "slice": lambda rows: rows.order_by("pk")[:1],
    "union": lambda rows: rows.union(rows),
    "distinct": lambda rows: rows.distinct("ts"),
}


@pytest.mark.every_backend
@pytest.mark.parametrize("change", UNDELETABLE.values(), ids=UNDELETABLE)
def test_purge_refuses_what_django_refuses_to_delete(change: Any) -> None:
    shelves = [on(Shelf, n) for n in range(2)]
    Label.objects.create(shelf=shelves[1])
    rows = Shelf.objects.with_deleted().filter(pk__in=[shelf.pk for shelf in shelves])
    errors = []
    for delete in (ObjectQuerySet.purge, ShardedQuerySet.delete):
        with pytest.raises((TypeError, NotSupportedError), match="delete") as error:
            delete(change(rows))
        errors.append((type(error.value), str(error.value)))
    assert errors[0] == errors[1]
    assert Shelf.objects.scatter().count() == 2


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_the_check_of_a_purge_reads_batches(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(object_queryset, "_BATCH", size)
    largest = 0
    collect = Collector.collect

    def measured(self: Any, rows: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal largest
        if args == () and not kwargs:
            largest = max(largest, len(rows))
        collect(self, rows, *args, **kwargs)

    monkeypatch.setattr(Collector, "collect", measured)
    shelves = [on(Shelf, n % 2) for n in range(8)]
    labels = [Label.objects.create(shelf=shelf) for shelf in shelves[5:]]
    with pytest.raises(ProtectedError) as error:
        Shelf.objects.with_deleted().scatter().purge()
    assert set(error.value.protected_objects) == set(labels)
    assert "'Label.shelf'" in str(error.value)
    assert largest == min(size, 4)
    assert set(Shelf.objects.with_deleted().scatter()) == set(shelves)
    Label.objects.scatter().delete()
    assert Shelf.objects.with_deleted().scatter().purge() == (8, {"pinboards.Shelf": 8})


def statements(run: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The nodes to which ``run`` sends statements, one entry per statement."""
    nodes: list[str] = []
    run_statement = Executor._run

    def recorded(self: Any, statement: Any, *args: Any) -> Any:
        nodes.append(statement.node)
        return run_statement(self, statement, *args)

    monkeypatch.setattr(Executor, "_run", recorded)
    run()
    return sorted(nodes)


@pytest.mark.every_backend
@pytest.mark.django_db(databases=DATABASES, transaction=True)
def test_a_batch_costs_one_round_trip_per_node(monkeypatch: pytest.MonkeyPatch) -> None:
    boards = [on(Board, n % 8, name=str(n)) for n in range(24)]
    ids = [board.pk for board in boards][::-1]
    batches: list[Any] = []
    sent = statements(lambda: batches.append(Board.objects.get_many(ids)), monkeypatch)
    if connections["pins_00000"].features.can_union_shards:
        assert len(sent) == len(set(sent)) == 2
    assert list(batches[0]) == ids
    assert [b._state.db for b in batches[0].values()] == [b._state.db for b in boards[::-1]]


@pytest.mark.django_db(databases=DATABASES, transaction=True)
def test_a_batch_is_cached_and_never_stale(later: LaterClock) -> None:
    users = [on(User, n % 8, name=str(n)) for n in range(10)]
    ids = [user.pk for user in users]
    # Makes the guards of the table; the writes have made those of the users.
    User.objects.get_many(pk + 1000 for pk in ids)
    later.ahead += 60
    User.objects.get_many(ids[:4])

    def queried(run: Any) -> int:
        count = 0
        aliases = [f"pins_{n:05d}" for n in range(8)]
        captures = [CaptureQueriesContext(connections[alias]) for alias in aliases]
        for capture in captures:
            capture.__enter__()
        run()
        for capture in captures:
            capture.__exit__(None, None, None)
            count += len(capture)
        return count

    assert queried(lambda: User.objects.get_many(ids[:4])) == 0
    assert queried(lambda: User.objects.get(ids[1])) == 0
    everybody = User.objects.with_deleted()
    wanted = dict(zip(ids, users, strict=True))
    for keys in (ids, [str(pk) for pk in ids], [ids[0], *map(str, ids)], [-1, *ids, 1 << 70]):
        assert everybody.in_bulk(keys) == wanted
    assert everybody.in_bulk([]) == {}
    with users[1].edit():
        users[1].name = "new"
    users[2].delete()
    first, second = (User.objects.get_many(ids[:4])[ids[3]] for _ in range(2))
    first.data["name"] = "mine"
    assert (second.name, User.objects.get(ids[3]).name) == ("3", "3")
    batch = User.objects.get_many(ids)
    assert [user.name for user in batch.values()] == ["0", "new", *"3456789"]
    assert batch[ids[1]] is not User.objects.get_many(ids)[ids[1]]


@pytest.mark.django_db(databases=DATABASES, transaction=True)
def test_a_row_on_another_shard_than_expected_is_read_but_not_cached(later: LaterClock) -> None:
    user, other = on(User, 1, name="old"), on(User, 2, name="other")
    User.objects.get_many(pk + 1000 for pk in (user.pk, other.pk))
    later.ahead += 60
    everybody, reader = User.objects.with_deleted(), queryset.current_reader()
    assert reader is not None
    for name in ("old", "new"):
        with user.edit():
            user.name = name
        later.ahead += 60
        for others in ([], [other]):
            # What a read has that was prepared before the key moved: the shard of another key.
            plan = plan_of(User)
            assert plan is not None
            reads, _ = reads_by_pk(plan, [other.pk])
            scope, token = reads[0].addresses.pop(other.pk).scope, str(user.pk)
            reads[0].addresses[user.pk] = RowAddress(scope, token, scope.object_name(token))
            reads += reads_by_pk(plan, [each.pk for each in others])[0]
            rows = {row.pk: row for row in read_together(plan, reads, reader, everybody)}
            assert (rows[user.pk].name, rows[user.pk]._state.db) == (name, "pins_00001")


@pytest.mark.django_db(databases=DATABASES, transaction=True)
def test_a_converter_of_the_project_gets_the_connection_of_each_row(
    later: LaterClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's own converters are called with the connection of one shard for all rows of a batch."""

    def from_db_value(self: Any, value: Any, expression: Any, connection: Any) -> Any:
        return f"{value} on {connection.alias}"

    ids = [on(User, n, name=str(n)).pk for n in range(8)]
    User.objects.get_many(pk + 1000 for pk in ids)
    later.ahead += 60
    monkeypatch.setattr(VersionColumn, "from_db_value", from_db_value, raising=False)
    monkeypatch.setattr(lookup_plan, "_plans", {})

    class Told(User):
        class Meta:
            proxy = True
            app_label = "pinboards"

    # The columns of a model remember their converters.
    for each in Told._meta.concrete_fields:
        each.__dict__.pop("cached_col", None)
    expected = [f"1 on pins_{n:05d}" for n in range(8)]
    try:
        for _ in range(3):
            assert [row.version for row in Told.objects.get_many(ids).values()] == expected
        with uncached():
            assert [row.version for row in Told.objects.get_many(ids).values()] == expected
    finally:
        for each in Told._meta.concrete_fields:
            each.__dict__.pop("cached_col", None)
