"""Ids that PostgreSQL makes, for the ORM and for programs that know nothing of it."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections

from sharded_orm.exceptions import PackedIDMismatch, TimestampedIDMismatch
from sharded_orm.ids.layout import PACKED, TIMESTAMPED, TimestampedID
from sharded_orm.ids.timestamps_postgresql import create_function
from tests.photos.models import Board, Visit
from tests.queries.conftest import DATABASES

pytestmark = [
    pytest.mark.postgresql_settings,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]
PINS, VISITS = "pins_00005", "visits_00001"


def run(alias: str, sql: str, *params: Any) -> list[Any]:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql, params or None)
        return list(cursor.fetchall()) if cursor.description else []


def copy_from_shard(number: int) -> None:
    """Leave in the schemas what a copy of the schemas of another shard has."""
    first = PACKED.pack(number, 1, 1)
    run(PINS, "SELECT setval(pg_get_serial_sequence('photos_app_board', 'id'), %s, false)", first)
    schema = connections[VISITS].settings_dict["SCHEMA"]
    run(VISITS, create_function(schema, number))


@pytest.fixture
def copied_from_shard_3(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The process has not inserted anything on the shard yet."""
    assert not Board.objects.using(PINS).exists()
    assert not Visit.objects.using(VISITS).exists()
    monkeypatch.setitem(Visit._meta.pk.__dict__, "_confirmed", set())
    copy_from_shard(3)
    yield
    copy_from_shard(0)
    for alias in (PINS, VISITS):
        call_command("migrate", database=alias, verbosity=0)


def test_sql_of_other_programs() -> None:
    """INSERT and COPY, with and without ids in between."""
    run(PINS, "INSERT INTO photos_app_board (name) VALUES ('a'), ('b')")
    run(VISITS, "INSERT INTO photos_app_visit (page) SELECT n::text FROM generate_series(1, 9) n")
    for alias, copy in (
        (PINS, "COPY photos_app_board (name) FROM STDIN"),
        (VISITS, "COPY photos_app_visit (page) FROM STDIN"),
    ):
        with connections[alias].cursor() as cursor, cursor.copy(copy) as rows:
            for name in "cd":
                rows.write_row([name])
    Board.objects.using(PINS).create(name="e")
    boards = Board.objects.using(PINS).order_by("pk")
    assert [board.name for board in boards] == list("abcde")
    assert all(board.pk in PACKED.counted(5, 1) for board in boards)
    assert len({board.pk for board in boards}) == 5
    visits = Visit.objects.using(VISITS).values_list("pk", flat=True)
    assert len(visits) == 11
    assert {TimestampedID.from_int(pk).shard for pk in visits} == {1}


@pytest.mark.parametrize("way", ["create", "bulk", "get_or_create"])
def test_a_copied_schema_stores_no_row(copied_from_shard_3: None, way: str) -> None:
    def write(rows: Any, row: Any, **values: Any) -> None:
        if way == "create":
            row.save(using=rows.db)
        elif way == "bulk":
            rows.bulk_create([row])
        else:
            rows.get_or_create(**values)

    boards, visits = Board.objects.using(PINS), Visit.objects.using(VISITS)
    with pytest.raises(PackedIDMismatch, match=f"migrate --database {PINS}"):
        write(boards, Board(name="x"), name="x")
    with pytest.raises(TimestampedIDMismatch, match=f"shard=3.*migrate --database {VISITS}"):
        write(visits, Visit(page="x"), page="x")
    assert not boards.exists() and not visits.exists()
    for alias in (PINS, VISITS):
        call_command("migrate", database=alias, verbosity=0)
    write(boards, Board(name="x"), name="x")
    write(visits, Visit(page="x"), page="x")
    assert boards.get().pk in PACKED.counted(5, 1)
    assert TIMESTAMPED.unpack(visits.get().pk).shard == 1


def test_a_copy_of_a_shard_with_a_higher_number_names_the_statement(
    copied_from_shard_3: None,
) -> None:
    """Nothing lowers a counter by itself: its ids might be those of deleted rows."""
    copy_from_shard(7)
    boards = Board.objects.using(PINS)
    with pytest.raises(PackedIDMismatch, match="copied from another shard") as caught:
        boards.create(name="x")
    assert not boards.exists()
    statement = str(caught.value).partition("and run ")[2].partition(" with the")[0]
    first = PACKED.pack(5, 1, 1)
    run(PINS, statement.replace("N", str(first)))
    assert boards.create(name="x").pk == first
