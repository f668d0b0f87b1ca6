"""Ids of shard, type and local number: counted by the shard's table, checked by the insert."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, cast

import pytest
from asgiref.sync import async_to_sync
from django import forms
from django.core import serializers
from django.core.exceptions import ValidationError
from django.core.management import call_command
from django.db import IntegrityError, connections, models, transaction
from django.db.migrations.writer import MigrationWriter
from django.test import TestCase

import sharded_orm
from sharded_orm import runtime
from sharded_orm.exceptions import (
    CrossShardRelation,
    InvalidID,
    InvalidShardKey,
    NoOpenShard,
    PackedIDMismatch,
    ShardKeyRequired,
    UnplacedKey,
)
from sharded_orm.ids.layout import PACKED, TIMESTAMPED, PackedID, PackedLayout
from sharded_orm.models import PackedIDField, Route
from sharded_orm.models.sharding import row_placement
from sharded_orm.models.sharding.options import required_options
from sharded_orm.signals import scattered
from tests.photos.models import Board, BoardProxy, Event, Like, Note, Person, Save
from tests.queries.conftest import DATABASES
from tests.versions import INSERTS_A_BATCH_ALONE

pytestmark = pytest.mark.every_backend
in_test = pytest.mark.django_db(databases=DATABASES)
committed = pytest.mark.django_db(databases=DATABASES, transaction=True)

assert_queries = TestCase().assertNumQueries


def on(number: int, **values: Any) -> Board:
    """Create a board on a given shard."""
    return Board.objects.using(f"pins_{number:05d}").create(**values)


def shard_of(row: Any) -> int:
    return int(str(row._state.db).rpartition("_")[2])


def restart_counter(alias: str, table: str, first: int) -> None:
    """Reset a table's counter, as TRUNCATE, CREATE TABLE LIKE or a mistake would."""
    vendor = connections[alias].vendor
    with connections[alias].cursor() as cursor:
        if vendor == "mysql":
            cursor.execute(f"ALTER TABLE {table} AUTO_INCREMENT = {first}")
        elif vendor == "postgresql":
            cursor.execute(
                f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), {first}, false)"
            )
        else:
            cursor.execute(f"DELETE FROM sqlite_sequence WHERE name = '{table}'")
            cursor.execute(f"INSERT INTO sqlite_sequence VALUES ('{table}', {first - 1})")


def count_behind(alias: str, table: str, pk: int) -> None:
    """Let the counter go on behind a given id, if inserting that id has not done so.

    A sequence of PostgreSQL takes no notice of given ids, in one database as in many.
    """
    if connections[alias].vendor == "postgresql":
        restart_counter(alias, table, pk + 1)


@pytest.fixture
def spoilt_counter() -> Iterator[None]:
    """Restore the counter of boards on shard 5 after tests that move it far ahead."""
    yield
    Board.objects.using("pins_00005").all().delete()
    restart_counter("pins_00005", "photos_app_board", PACKED.pack(5, 1, 1))


@in_test
def test_the_first_id_of_a_shard() -> None:
    for number in (0, 5, 7):
        board = on(number, name="first")
        parts = PackedID.from_int(board.pk)
        assert (parts.shard, parts.type) == (number, 1)
        assert on(number, name="second").pk == board.pk + 1


@in_test
def test_every_way_to_make_a_row() -> None:
    saved = Board(name="saved")
    assert saved.pk is None
    saved.save()
    created = Board.objects.create(name="created")
    bulk = Board.objects.bulk_create([Board(name=f"b{n}") for n in range(40)])
    made, is_new = Board.objects.using("pins_00002").get_or_create(name="made")
    assert is_new
    assert Board.objects.using("pins_00002").get_or_create(name="made") == (made, False)
    for row in (saved, created, made, *bulk):
        parts = PackedID.from_int(row.pk)
        assert (parts.shard, parts.type) == (shard_of(row), 1)
        assert not row._state.adding
        assert Board.objects.get(pk=row.pk).name == row.name
    assert len({row.pk for row in (saved, created, made, *bulk)}) == 43
    # 40 draws of 8 shards: that all are the same is practically impossible.
    assert len({shard_of(row) for row in bulk}) > 1


@in_test
@pytest.mark.parametrize("bulk", [False, True])
def test_a_row_whose_node_is_down_goes_elsewhere_when_it_is_saved_again(
    monkeypatch: pytest.MonkeyPatch, bulk: bool
) -> None:
    board, options = Board(name="again"), required_options(Board)
    strategy, first = runtime.strategy("pins"), row_placement.place(options, board)
    # It keeps its shard as long as the node answers.
    assert row_placement.place(options, board) == first
    monkeypatch.setattr(
        strategy, "node_failure", lambda shard: OSError() if shard.node == first.node else None
    )
    Board.objects.bulk_create([board]) if bulk else board.save()
    stored_on = runtime.topology().resolve(str(board._state.db))
    assert stored_on is not None and stored_on.node != first.node


@in_test
def test_the_id_routes() -> None:
    boards = [on(number, name=str(number)) for number in (1, 4, 4)]
    with assert_queries(1, using="pins"):
        assert Board.objects.get(pk=boards[1].pk) == boards[1]
    assert Board.objects.get(id=PackedID.from_int(boards[0].pk)) == boards[0]
    ids = [board.pk for board in boards]
    assert Board.objects.filter(pk__in=ids).explain_routing().shards == (1, 4)
    assert set(Board.objects.filter(pk__in=ids)) == set(boards)
    assert not Board.objects.filter(pk=PACKED.pack(3, 1, 1)).exists()
    boards[0].name = "changed"
    with assert_queries(1, using="pins"):
        boards[0].save()
    boards[0].refresh_from_db()
    assert boards[0].name == "changed"
    assert Board.objects.filter(pk__in=ids).update(name="x") == 3
    assert Board.objects.filter(pk=ids[2]).delete()[0] == 1
    with pytest.raises(ShardKeyRequired):
        Board.objects.filter(name="x").first()
    with pytest.raises(Board.DoesNotExist):
        Board.objects.get(pk=PACKED.pack(999, 1, 1))


@in_test
def test_rows_whose_key_is_another_packed_id() -> None:
    board = on(6, name="b")
    saves = [
        board.saves.create(note="related"),
        Save.objects.create(board=board, note="by instance"),
        Save.objects.create(board_id=board.pk, note="by id"),
        *Save.objects.bulk_create([Save(board=board, note="bulk")]),
    ]
    assert [PackedID.from_int(row.pk).shard for row in saves] == [6] * 4
    assert [PackedID.from_int(row.pk).type for row in saves] == [2] * 4
    found, is_new = Save.objects.get_or_create(board=board, note="bulk")
    assert (found, is_new) == (saves[3], False)

    def route(query: Any) -> Route:
        answer: Route = query.explain_routing()
        return answer

    # By the id alone; Django's fast path and the where tree.
    with assert_queries(1, using="pins"):
        assert Save.objects.get(pk=saves[0].pk) == saves[0]
    assert route(Save.objects.filter(pk=saves[0].pk)).shards == (6,)
    assert route(Save.objects.filter(pk__in=[s.pk for s in saves])).shards == (6,)
    assert set(Save.objects.filter(board__in=[board.pk])) == set(saves)
    assert Save.objects.filter(board__id=board.pk).count() == 4
    # By a foreign key to an id that is not the shard key of its own model.
    like = Like.objects.create(board=board, save_of=saves[1])
    assert Like.objects.get(save_of=saves[1].pk) == like
    assert Like.objects.get(save_of_id=saves[1].pk, id=like.pk) == like
    assert Like.objects.filter(save_of__note="by instance", save_of__id=saves[1].pk).get() == like
    other = PACKED.pack(2, 2, 1)
    assert route(Like.objects.filter(save_of__in=[saves[1].pk, other])).shards == (2, 6)
    assert list(Like.objects.filter(save_of__in=[saves[1].pk, other])) == [like]
    assert route(Like.objects.filter(save_of=other, board=board)).shards == ()
    assert not Like.objects.filter(save_of=other, board=board).exists()


@in_test
def test_what_does_not_tell_the_shard() -> None:
    board = on(3, name="b")
    like = Like.objects.create(board=board)
    # NULL is in many rows, on any shard.
    with pytest.raises(ShardKeyRequired):
        Like.objects.filter(save_of=None).first()
    assert Like.objects.scatter().filter(save_of=None).get() == like
    with pytest.raises(ShardKeyRequired):
        Like.objects.exclude(pk=like.pk).first()
    with pytest.raises(ShardKeyRequired):
        Like.objects.filter(pk__gt=like.pk).first()


@in_test
def test_near_places_a_row_beside_another() -> None:
    board = on(5, name="b")
    save = Save.objects.create(board=board, note="s")
    built = Board(name="1", near=board)
    built.save()
    rows = [
        built,
        Board.objects.create(name="2", near=save),
        *Board.objects.bulk_create([Board(name="3", near=board), Board(name="4", near=board)]),
        Board.objects.get_or_create(name="5", near=board)[0],
        Board.objects.using("pins_00005").get_or_create(name="6", defaults={"near": save})[0],
    ]
    assert [shard_of(row) for row in rows] == [5] * 6
    assert Board.objects.get_or_create(name="5", near=board) == (rows[4], False)
    row, is_new = Board.objects.update_or_create(near=board, name="5", defaults={"parent": board})
    assert (row, is_new) == (rows[4], False)
    assert Board.objects.update_or_create(near=board, name="7")[0]._state.db == "pins_00005"
    with pytest.raises(ShardKeyRequired):
        # The shard to search would be a guess.
        Board.objects.get_or_create(name="8", defaults={"near": board})
    assert built.near is None
    assert Board(name="x", near=None).near is None


@in_test
def test_near_what_has_no_shard_or_another_group() -> None:
    board = on(5, name="b")
    with pytest.raises(CrossShardRelation, match="no row of group 'pins'"):
        Board(near=Event.objects.create(account="x"))
    with pytest.raises(CrossShardRelation, match="no row of group 'pins'"):
        Board(near=Person(username="x"))
    with pytest.raises(CrossShardRelation, match="stays on 'pins_00005'"):
        board.near = on(6, name="c")
    with pytest.raises(UnplacedKey, match="save it first"):
        Board.objects.create(name="x", near=Board(name="unsaved"))
    with pytest.raises(CrossShardRelation, match="pins_00006"):
        Board(name="x", near=board).save(using="pins_00006")
    with pytest.raises(TypeError, match="near"):
        Save(near=board)  # its board is its shard key
    # The save waits for a neighbour that is saved later.
    later = Board(name="later")
    beside = Board(name="beside", near=later)
    later.save()
    beside.save()
    assert shard_of(beside) == shard_of(later)


@in_test
def test_a_row_is_stored_beside_those_it_refers_to() -> None:
    board = on(5, name="b")
    assert shard_of(Board.objects.create(name="by instance", parent=board)) == 5
    assert shard_of(Board.objects.create(name="by id", parent_id=board.pk)) == 5
    with pytest.raises(CrossShardRelation, match="parent"), transaction.atomic(using="pins"):
        Board.objects.create(name="torn", parent=board, near=on(2, name="elsewhere"))


@in_test
def test_the_random_shard_is_an_open_one(monkeypatch: pytest.MonkeyPatch) -> None:
    group = runtime.group("pins")
    one, two = group.ranges
    object.__setattr__(group, "ranges", (_with(one, open=False), two))
    try:
        assert {shard_of(b) for b in Board.objects.bulk_create([Board() for _ in range(60)])} == {
            4, 5, 6, 7,
        }  # fmt: skip
        object.__setattr__(group, "ranges", (_with(one, open=False), _with(two, open=False)))
        with pytest.raises(NoOpenShard, match="'pins'"):
            Board.objects.create(name="x")
        # A closed shard takes no new rows, except those that belong beside existing ones.
        board = on(1, name="named")
        assert shard_of(Board.objects.create(near=board)) == 1
    finally:
        object.__setattr__(group, "ranges", (one, two))


def _with(shard_range: Any, **changed: Any) -> Any:
    from dataclasses import replace

    return replace(shard_range, **changed)


@in_test
def test_the_shard_that_was_chosen_stays_chosen() -> None:
    board = Board(name="x")
    with sharded_orm.atomic(board):
        board.save()
    alias = board._state.db
    assert transaction.get_connection(alias).alias == alias
    aliases = set()
    for _ in range(20):
        board = Board(name="x")
        from django.db import router

        first = router.db_for_write(Board, instance=board)
        assert router.db_for_write(Board, instance=board) == first
        board.save()
        assert board._state.db == first
        aliases.add(first)
    assert len(aliases) > 1


@in_test
def test_a_copy_is_a_new_row() -> None:
    board = on(5, name="x")
    first = board.pk
    board.pk, board._state.adding = None, True
    board.save()
    assert board.pk != first
    assert PackedID.from_int(board.pk).shard == shard_of(board)


@in_test
def test_explicit_ids() -> None:
    own = PACKED.pack(3, 1, 500)
    assert on(3, id=own, name="x").pk == own
    assert shard_of(Board.objects.create(pk=own + 1, name="x")) == 3
    assert Board.objects.get_or_create(pk=own + 2)[0].pk == own + 2
    mixed = [Board(pk=own - 1, name="m"), Board(name="m", near=Board.objects.get(pk=own))]
    Board.objects.bulk_create(mixed)
    assert [shard_of(row) for row in mixed] == [3, 3]
    # The table goes on counting behind them.
    count_behind("pins_00003", "photos_app_board", own + 3)
    assert on(3, name="next").pk == own + 4
    board = Board.objects.get(pk=own)
    for make in (
        lambda: Board.objects.create(pk=PACKED.pack(3, 2, 1)),
        lambda: Board.objects.bulk_create([Board(pk=PACKED.pack(3, 0, 1))]),
        lambda: Save.objects.create(pk=PACKED.pack(4, 2, 1), board=board),
        lambda: Save.objects.bulk_create([Save(pk=PACKED.pack(3, 1, 1), board=board)]),
    ):
        with pytest.raises(PackedIDMismatch, match="Leave the id out"):
            with transaction.atomic(using="pins"):
                make()
    with pytest.raises(InvalidID), transaction.atomic(using="pins"):
        Save.objects.create(pk=-1, board=board)
    with pytest.raises(InvalidShardKey):
        Board.objects.create(pk=-1)
    with pytest.raises(CrossShardRelation):
        Board(pk=PACKED.pack(4, 1, 1)).save(using="pins_00003")
    with pytest.raises(IntegrityError), transaction.atomic(using="pins"):
        Board.objects.create(pk=own)


@in_test
def test_fixtures_keep_their_ids() -> None:
    own, wrong = PACKED.pack(3, 1, 7), PACKED.pack(3, 2, 7)
    for value in (own, wrong):
        text = serializers.serialize("json", [Board(pk=value, name="x")])
        (loaded,) = serializers.deserialize("json", text, using="pins_00003")
        if value == own:
            loaded.save(using="pins_00003")
        else:
            with pytest.raises(PackedIDMismatch), transaction.atomic(using="pins_00003"):
                loaded.save(using="pins_00003")
    assert Board.objects.get(pk=own).name == "x"


class BoardForm(forms.ModelForm):  # type: ignore[type-arg]
    class Meta:
        model = Board
        fields = ["id", "name", "parent"]


@in_test
def test_forms_and_validation() -> None:
    Board(name="x").full_clean()
    board = on(5, name="x")
    form = BoardForm({"name": "by form"})
    assert list(form.fields) == ["name", "parent"]
    child = Board(name="child", parent_id=board.pk)
    child.full_clean()
    with pytest.raises(ValidationError) as caught:
        Board(name="child", parent_id=board.pk + 99).full_clean()
    assert set(caught.value.message_dict) == {"parent"}
    with pytest.raises(ValidationError, match="already exists"):
        Board(pk=board.pk, name="again").full_clean()
    with pytest.raises(ValidationError):
        Board(near=board, name="").full_clean()


@committed
def test_a_new_row_costs_one_insert() -> None:
    board = on(5, name="warm")
    # PostgreSQL checks the id in the INSERT. Others get BEGIN, INSERT, COMMIT.
    cost = 1 if connections["pins_00005"].vendor == "postgresql" else 3
    with assert_queries(cost, using="pins_00005"):
        Board.objects.create(name="x", near=board)
    with assert_queries(1, using="pins_00005"):
        Board.objects.create(pk=PACKED.pack(5, 1, 900), name="x")
    with assert_queries(cost if INSERTS_A_BATCH_ALONE else 3, using="pins_00005"):
        Board.objects.bulk_create([Board(near=board) for _ in range(10)])
    with sharded_orm.atomic(board), assert_queries(1, using="pins_00005"):
        Board.objects.create(name="x", near=board)


RESET: list[Callable[[Board], Any]] = [
    lambda near: Board(near=near, name="new").save(),
    lambda near: Board.objects.create(near=near, name="new"),
    lambda near: Board.objects.bulk_create([Board(near=near, name="new") for _ in range(3)]),
    lambda near: Board.objects.bulk_create(
        [Board(near=near, name="new") for _ in range(3)], ignore_conflicts=True
    ),
    lambda near: Board.objects.get_or_create(near=near, name="new"),
]


@committed
@pytest.mark.parametrize("write", RESET)
@pytest.mark.parametrize("inside", [False, True])
def test_a_table_that_counts_from_1_stores_no_row(
    write: Callable[[Board], Any], inside: bool
) -> None:
    near = on(5, name="near")
    Board.objects.filter(pk=near.pk).delete()
    restart_counter("pins_00005", "photos_app_board", 1)
    remedy = r"counted 1, .*migrate --database pins_00005"
    if inside:
        with pytest.raises(PackedIDMismatch, match=remedy), sharded_orm.atomic(near):
            write(near)
    else:
        with pytest.raises(PackedIDMismatch, match=remedy):
            write(near)
    assert not Board.objects.using("pins_00005").exists()
    # The remedy.
    call_command("migrate", database="pins_00005", verbosity=0)
    write(near)
    made = Board.objects.using("pins_00005").filter(name="new")
    assert made
    assert all(row.pk in PACKED.counted(5, 1) for row in made)


@committed
def test_migrating_again_never_lowers_a_counter() -> None:
    board = on(5, name="x")
    Board.objects.filter(pk=board.pk).delete()
    call_command("migrate", database="pins_00005", verbosity=0)
    assert on(5, name="y").pk == board.pk + 1


@committed
def test_flush_sets_the_counter_again() -> None:
    on(5, name="x")
    call_command("flush", database="pins_00005", verbosity=0, interactive=False)
    assert on(5, name="y").pk == PACKED.pack(5, 1, 1)


@committed
def test_the_local_ids_run_out(db_all: None, spoilt_counter: None) -> None:
    last = PACKED.counted(5, 1)[-1]
    near = on(5, id=last - 1, name="near")
    count_behind("pins_00005", "photos_app_board", last - 1)
    assert Board.objects.create(near=near, name="last").pk == last
    # Each attempt advances the counter, which a rollback does not reset.
    for _ in range(2):
        with pytest.raises(PackedIDMismatch, match="used up"):
            Board.objects.create(near=near, name="beyond")
    assert Board.objects.using("pins_00005").count() == 2


@committed
def test_many_rows_that_use_the_ids_up_are_not_stored(db_all: None, spoilt_counter: None) -> None:
    last = PACKED.counted(5, 1)[-1]
    near = on(5, id=last - 2, name="near")
    count_behind("pins_00005", "photos_app_board", last - 2)
    with pytest.raises(PackedIDMismatch, match=f"counted {last + 1}.*used up"):
        Board.objects.bulk_create([Board(near=near, name="new") for _ in range(3)])
    assert Board.objects.using("pins_00005").get() == near


@committed
def test_a_foreign_row_that_moved_the_counter_is_told(db_all: None, spoilt_counter: None) -> None:
    near = on(5, name="near")
    restart_counter("pins_00005", "photos_app_board", PACKED.pack(6, 1, 1))
    with pytest.raises(PackedIDMismatch, match="highest own id"):
        Board.objects.create(near=near, name="x")


@pytest.mark.django_db(databases=DATABASES, transaction=True, reset_sequences=True)
def test_reset_sequences_begins_at_the_shards_own_first_id() -> None:
    assert on(5, name="x").pk == PACKED.pack(5, 1, 1)


@pytest.mark.django_db(databases=DATABASES, transaction=True, reset_sequences=True)
def test_reset_sequences_again() -> None:
    assert on(5, name="x").pk == PACKED.pack(5, 1, 1)


@in_test
def test_async_methods() -> None:
    near = on(5, name="near")

    async def write() -> Board:
        made = await Board.objects.acreate(name="x", near=near)
        return cast(Board, await Board.objects.aget(pk=made.pk))

    assert shard_of(async_to_sync(write)()) == 5


@in_test
def test_sums_over_shards_see_every_row() -> None:
    for number in (1, 2, 6):
        on(number, name="s")
    assert Board.objects.scatter().filter(name="s").count() == 3
    rows = list(Board.objects.scatter().filter(name="s").order_by("-pk"))
    assert [shard_of(row) for row in rows] == [6, 2, 1]


@committed
def test_proxies_are_checked_too(db_all: None, spoilt_counter: None) -> None:
    near = on(5, name="near")
    (row,) = BoardProxy.objects.bulk_create([BoardProxy(name="x", near=near)])
    assert row.pk in PACKED.counted(5, 1)
    restart_counter("pins_00005", "photos_app_board", PACKED.pack(6, 1, 1))
    with pytest.raises(PackedIDMismatch):
        BoardProxy.objects.bulk_create([BoardProxy(name="y", near=near)])
    with pytest.raises(PackedIDMismatch), transaction.atomic(using="pins"):
        BoardProxy.objects.bulk_create([BoardProxy(pk=PACKED.pack(5, 2, 1))])


@in_test
def test_what_chose_the_shard_lasts_until_the_whole_bulk_is_stored() -> None:
    near = Note.objects.using("pins_00005").create(text="near")
    rows = [Note(text="1", near=near), Note(text="2", near=near, stamp=near.stamp)]
    with pytest.raises(IntegrityError), transaction.atomic(using="pins_00005"):
        Note.objects.bulk_create(rows, batch_size=1)
    assert [row.near for row in rows] == [near, near]
    rows[1].stamp = None
    Note.objects.bulk_create(rows, batch_size=1)
    assert [shard_of(row) for row in rows] == [5, 5]
    assert [row.near for row in rows] == [None, None]


@in_test
def test_validating_a_row_whose_id_is_still_to_be_made() -> None:
    board = on(5, name="b")
    Note(board=board, text="x").full_clean()
    Note(board_id=board.pk, text="x").full_clean()
    for missing in (board.pk + 77, PACKED.pack(999, 1, 1)):
        with pytest.raises(ValidationError, match="not a valid choice"):
            Note(board_id=missing, text="x").full_clean()
        with pytest.raises(ValidationError, match="not a valid choice"):
            Board(parent_id=missing, name="x").full_clean()


@in_test
def test_relating_to_a_row_that_is_saved_later() -> None:
    parent = Board(name="parent")
    save, note = Save(board=parent, note="x"), Note(board=parent, text="x")
    parent.save()
    save.save()
    note.save()
    assert shard_of(parent) == shard_of(save) == shard_of(note)


@in_test
@pytest.mark.parametrize(("child", "name"), [(Save, "saves"), (Note, "notes")])
def test_inline_forms_of_a_new_parent(child: Any, name: str) -> None:
    field = "note" if child is Save else "text"
    forms_of = forms.inlineformset_factory(Board, child, fields=[field])
    parent = Board(name="parent")
    data = {f"{name}-TOTAL_FORMS": "1", f"{name}-INITIAL_FORMS": "0", f"{name}-0-{field}": "hi"}
    inline = forms_of(data, instance=parent)
    assert inline.is_valid(), inline.errors
    parent.save()
    (row,) = inline.save()
    assert row._state.db == parent._state.db


@in_test
def test_in_bulk_is_routed_by_its_ids() -> None:
    boards = [on(number, name=str(number)) for number in (1, 4, 4)]
    found = Board.objects.in_bulk([board.pk for board in boards])
    assert found == {board.pk: board for board in boards}
    assert Board.objects.in_bulk([boards[0].pk]) == {boards[0].pk: boards[0]}
    assert Board.objects.in_bulk([]) == {}
    assert Board.objects.using("pins_00004").in_bulk() == {b.pk: b for b in boards[1:]}
    with pytest.raises(ShardKeyRequired):
        Board.objects.in_bulk()
    with pytest.raises(ValueError, match="must be a unique field"):
        Board.objects.in_bulk(["x"], field_name="name")


@pytest.mark.parametrize("in_transaction", [True, False])
@committed
def test_in_bulk_is_the_same_as_rows_one_by_one(in_transaction: bool) -> None:
    boards = [on(number % 8, name=str(number)) for number in range(20)]
    ids = [board.pk for board in boards]
    boards[3].name = "new"
    with transaction.atomic(using="pins") if in_transaction else nullcontext():
        boards[3].save()
        boards[4].delete()
        wanted = {board.pk: board.name for board in boards if board.pk}
        for given in (ids, [*ids, *ids], [-1, *ids, 1 << 70, 500 << 46, ids[0] + 1000]):
            for rows in (
                Board.objects.all(),
                Board.objects.scatter(),
                Board.objects.order_by("pk"),
            ):
                read = rows.in_bulk(given)
                assert {pk: row.name for pk, row in read.items()} == wanted
                assert {row._state.db for row in read.values()} == {
                    f"pins_0000{n}" for n in range(8)
                }
    assert Board.objects.filter(name="7").in_bulk(ids) == {ids[7]: boards[7]}
    assert "name" not in Board.objects.only("pk").in_bulk(ids)[ids[0]].__dict__
    with pytest.raises(TypeError, match="limit"):
        Board.objects.scatter()[:2].in_bulk(ids)


class StoredElsewhere(PackedIDField):
    """Stores another number than the id of the instance."""

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        value = super().get_db_prep_value(value, connection, prepared)
        return value if value is None else type(value)(value + 7)

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        return value if value is None else value - 7


@committed
def test_in_bulk_of_ids_that_their_field_converts(monkeypatch: pytest.MonkeyPatch) -> None:
    boards = [on(number, name=str(number)) for number in (1, 2)]
    monkeypatch.setattr(Board._meta.pk, "__class__", StoredElsewhere)
    read = Board.objects.in_bulk([board.pk - 7 for board in boards])
    assert {pk: row.name for pk, row in read.items()} == {b.pk - 7: b.name for b in boards}


@in_test
def test_in_bulk_that_scatters_is_reported() -> None:
    ids = [on(number).pk for number in (1, 4, 4)]
    seen: list[tuple[int, ...]] = []

    def note(route: Any, **named: Any) -> None:
        seen.append(route.shards)

    scattered.connect(note, sender=Board)
    try:
        Board.objects.scatter().in_bulk(ids)
        Board.objects.in_bulk(ids)
    finally:
        scattered.disconnect(note, sender=Board)
    assert seen == [(1, 4)]


@in_test
def test_near_and_a_given_id_must_agree() -> None:
    near = on(5, name="near")
    own, other = PACKED.pack(5, 1, 900), PACKED.pack(4, 1, 900)
    assert Board.objects.create(pk=own, near=near)._state.db == "pins_00005"
    for make in (
        lambda: Board.objects.create(pk=other, near=near),
        lambda: Board.objects.bulk_create([Board(pk=other, near=near)]),
        lambda: Board.objects.using("pins_00004").bulk_create([Board(pk=other, near=near)]),
    ):
        with pytest.raises(CrossShardRelation, match="near"), transaction.atomic(using="pins"):
            make()
    with pytest.raises(CrossShardRelation), transaction.atomic(using="pins"):
        Board.objects.get_or_create(pk=other, near=near)


@in_test
def test_near_on_a_named_shard() -> None:
    near = on(5, name="near")
    boards = Board.objects.using("pins_00005")
    row, is_new = boards.get_or_create(name="x", near=near)
    assert (shard_of(row), is_new) == (5, True)
    assert boards.update_or_create(name="x", near=near) == (row, False)
    assert boards.get_or_create(name="x", near=None) == (row, False)
    with pytest.raises(CrossShardRelation, match="pins_00004"):
        Board.objects.using("pins_00004").get_or_create(name="x", near=near)


@committed
def test_no_row_stays_with_autocommit_off(db_all: None, spoilt_counter: None) -> None:
    near = on(5, name="near")
    restart_counter("pins_00005", "photos_app_board", PACKED.pack(6, 1, 1))
    connection = connections["pins_00005"]
    connection.set_autocommit(False)
    try:
        with pytest.raises(PackedIDMismatch):
            Board.objects.create(name="x", near=near)
        connection.commit()
    finally:
        connection.rollback()
        connection.set_autocommit(True)
    assert Board.objects.using("pins_00005").get() == near


@committed
def test_a_foreign_row_is_found_behind_any_manager(
    db_all: None, spoilt_counter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = on(5, name="near")
    foreign = PACKED.pack(6, 1, 1)
    models.QuerySet(Board).using("pins_00005").filter(pk=near.pk).update(id=foreign)
    field: Any = Board._meta.pk
    with monkeypatch.context() as patched, transaction.atomic(using="pins_00005"):
        patched.setitem(Board._meta.__dict__, "base_manager", None)
        with pytest.raises(PackedIDMismatch, match=f"{foreign}, or held it before"):
            # As if the answer held no ids.
            field.insert_rows([Board(name="x")], "pins_00005", [], lambda returning: [])
        transaction.set_rollback(False, using="pins_00005")


def test_the_layout_is_one_of_packed_ids() -> None:
    with pytest.raises(TypeError, match="no PackedLayout"):
        PackedIDField(type_id=1, layout=TIMESTAMPED)  # type: ignore[arg-type]


def test_migrations_hold_the_layout() -> None:
    for options in ({"layout": PackedLayout(16, 9, 37)}, {}):
        field = PackedIDField(type_id=1, primary_key=True, **options)
        text, imports = MigrationWriter.serialize(field)
        names: dict[str, Any] = {}
        exec("\n".join([*imports, f"field = {text}"]), names)
        assert names["field"].layout == field.layout
        assert ("layout" in text) is bool(options)
