"""A write that a trigger of a fence refuses raises KeyFenced, however the write was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import OperationalError, connections, transaction

import sharded_orm
from sharded_orm.backends.fence import MARKER, SQLSTATE
from sharded_orm.exceptions import KeyFenced, KeyMoved
from tests.photos.models import Photo
from tests.queries.conftest import DATABASES
from tests.queries.moves.conftest import KEY
from tests.queries.moves.hand_move import SOURCE, HandMove, alias

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]


@pytest.fixture
def fence(move: HandMove) -> Iterator[None]:
    """Triggers that refuse every write to the table of photos on the shard SOURCE."""
    connection = connections[alias(SOURCE)]
    table = Photo._meta.db_table
    refusal = (
        f"SELECT RAISE(ABORT, '{MARKER}')"
        if connection.vendor == "sqlite"
        else f"SIGNAL SQLSTATE '{SQLSTATE}' SET MESSAGE_TEXT = '{MARKER}'"
    )
    events = ("INSERT", "UPDATE", "DELETE")
    with connection.cursor() as cursor:
        for event in events:
            cursor.execute(
                f"CREATE TRIGGER fence_{event} BEFORE {event} ON {table} FOR EACH ROW"
                f" BEGIN {refusal}; END"
            )
    yield
    with connection.cursor() as cursor:
        for event in events:
            cursor.execute(f"DROP TRIGGER fence_{event}")


def raw_sql() -> None:
    with connections[alias(SOURCE)].cursor() as cursor:
        cursor.execute(f"UPDATE {Photo._meta.db_table} SET stars = 9 WHERE user_id = %s", [KEY])


WRITES: dict[str, Callable[[], Any]] = {
    "save": lambda: Photo.objects.get(user_id=KEY).save(),
    "create": lambda: Photo.objects.create(user_id=KEY, title="new"),
    "bulk_create": lambda: Photo.objects.bulk_create([Photo(user_id=KEY, title="new")]),
    "ignore_conflicts": lambda: Photo.objects.bulk_create(
        [Photo(user_id=KEY, title="new")], ignore_conflicts=True
    ),
    "update": lambda: Photo.objects.filter(user_id=KEY).update(stars=9),
    "delete": lambda: Photo.objects.filter(user_id=KEY).delete(),
    "delete a row": lambda: Photo.objects.get(user_id=KEY).delete(),
    "raw SQL": raw_sql,
}


@pytest.mark.parametrize("name", WRITES)
def test_a_refused_write(fence: None, name: str) -> None:
    with pytest.raises(KeyFenced, match=r"'photos_00003' has refused a write") as caught:
        WRITES[name]()
    assert isinstance(caught.value, OperationalError) and isinstance(caught.value, KeyMoved)
    assert list(Photo.objects.filter(user_id=KEY).values_list("title", "stars")) == [("p", 1)]


@pytest.mark.parametrize("name", WRITES)
def test_inside_a_transaction_the_whole_transaction_fails(fence: None, name: str) -> None:
    with pytest.raises(KeyFenced):
        with sharded_orm.atomic(Photo, user_id=KEY):
            WRITES[name]()
    assert not connections[alias(SOURCE)].in_atomic_block
    with pytest.raises(transaction.TransactionManagementError):
        with transaction.atomic(alias(SOURCE)):
            with pytest.raises(KeyFenced):
                WRITES["update"]()
            transaction.set_rollback(True, alias(SOURCE))
            Photo.objects.filter(user_id=KEY).count()
    assert list(Photo.objects.filter(user_id=KEY).values_list("title", "stars")) == [("p", 1)]


def test_another_error_with_the_same_code_is_not_taken_for_it(move: HandMove) -> None:
    connection = connections[alias(SOURCE)]
    if connection.vendor == "sqlite":
        sql = "INSERT INTO no_such_table VALUES (1)"
    else:
        sql = f"SIGNAL SQLSTATE '{SQLSTATE}' SET MESSAGE_TEXT = 'of the project'"
    with pytest.raises(OperationalError) as caught, connection.cursor() as cursor:
        cursor.execute(sql)
    assert not isinstance(caught.value, KeyMoved)
