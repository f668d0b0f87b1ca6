"""A new shard key that is a foreign key to the global database: the row to which it refers must exist."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
from django.core import serializers
from django.db import IntegrityError, connections, transaction
from django.test.utils import CaptureQueriesContext

import sharded_orm
from sharded_orm import runtime
from sharded_orm.exceptions import DanglingShardKey
from sharded_orm.models.tables.directory import Placement
from tests.photos.models import Album, Person, Photo
from tests.queries.conftest import DATABASES

pytestmark = [pytest.mark.django_db(databases=DATABASES), pytest.mark.every_backend]

TYPO = 987_654


@contextmanager
def queries(**counts: int) -> Iterator[None]:
    """Exactly so many queries are sent on these aliases."""
    with ExitStack() as stack:
        captured = {
            alias: stack.enter_context(CaptureQueriesContext(connections[alias]))
            for alias in counts
        }
        yield
    sent = {alias: [q["sql"] for q in context] for alias, context in captured.items()}
    assert {alias: len(sql) for alias, sql in sent.items()} == counts, sent


def placed(key: int) -> bool:
    return Placement.objects.using("directory").filter(group="photos", key=str(key)).exists()


def atomic() -> None:
    with sharded_orm.atomic(Album, owner=TYPO):
        pytest.fail("The block must not be entered.")


def atomic_with_an_instance() -> None:
    with sharded_orm.atomic(Album, owner=Person(pk=TYPO, username="not saved")):
        pytest.fail("The block must not be entered.")


def create_bound() -> None:
    with sharded_orm.bound(owner=TYPO):
        Album.objects.create(title="x")


def deserialize() -> None:
    row = {"model": "photos_app.album", "pk": 1, "fields": {"owner": TYPO, "title": "x"}}
    for obj in serializers.deserialize("python", [row]):
        obj.save()


WRITES: dict[str, Callable[[], object]] = {
    "save": lambda: Album(owner_id=TYPO, title="x").save(),
    "save(using=)": lambda: Album(owner_id=TYPO, title="x").save(using="photos_00003"),
    "create": lambda: Album.objects.create(owner_id=TYPO, title="x"),
    "create of an unsaved row": lambda: Album.objects.create(
        owner=Person(pk=TYPO, username="not saved"), title="x"
    ),
    "create of text": lambda: Album.objects.create(owner_id=str(TYPO), title="x"),
    "bulk_create": lambda: Album.objects.bulk_create([Album(owner_id=TYPO, title="x")]),
    "get_or_create": lambda: Album.objects.get_or_create(owner_id=TYPO, title="x"),
    "update_or_create": lambda: Album.objects.update_or_create(owner_id=TYPO, title="x"),
    "atomic": atomic,
    "atomic with an instance": atomic_with_an_instance,
    "bound": create_bound,
    "a deserialized row": deserialize,
}


@pytest.mark.parametrize("write", WRITES)
def test_no_write_places_a_key_without_a_row(write: str) -> None:
    with pytest.raises(DanglingShardKey) as caught:
        WRITES[write]()
    for part in (str(TYPO), "photos_app.Person", "'photos'", "save that row first"):
        assert part in str(caught.value)
    assert not placed(TYPO)
    assert Album.objects.scatter().count() == 0


def test_it_is_the_error_that_one_database_raises() -> None:
    """Of a foreign key with a constraint; and the transaction goes on, because nothing was sent."""
    person = Person.objects.create(username="ada")
    with transaction.atomic(using="photos"):
        with pytest.raises(IntegrityError):
            Album.objects.create(owner_id=TYPO, title="x")
        Album.objects.create(owner=person, title="y")
    assert Album.objects.filter(owner=person).count() == 1


def test_one_of_many_new_keys_without_a_row_places_none() -> None:
    people = [Person.objects.create(username=f"p{n}") for n in range(3)]
    keys = [*(person.pk for person in people), TYPO]
    with pytest.raises(DanglingShardKey, match=str(TYPO)):
        Album.objects.bulk_create([Album(owner_id=key, title="x") for key in keys])
    assert not any(map(placed, keys))


def test_a_row_of_the_same_transaction_is_found() -> None:
    with pytest.raises(KeyError), transaction.atomic("default"):
        person = Person.objects.create(username="ada")
        assert Album.objects.create(owner=person, title="x").owner == person
        raise KeyError
    # The row was rolled back, and the key keeps its shard.
    assert placed(person.pk)
    assert Album.objects.get(owner_id=person.pk).title == "x"


def test_reading_a_key_without_a_row_places_nothing_and_asks_for_no_row() -> None:
    rows = Album.objects.filter(owner_id=TYPO)
    with queries(default=0, photos=0):
        assert list(rows) == []
        assert not rows.exists()
        assert rows.count() == 0
        assert rows.update(title="x") == 0
        assert rows.delete()[0] == 0
        with pytest.raises(Album.DoesNotExist):
            rows.get()
    assert not placed(TYPO)


def test_a_new_key_costs_one_query_and_a_placed_key_none() -> None:
    ada, bob, eve = (Person.objects.create(username=name) for name in ("ada", "bob", "eve"))
    # Look for the key, place it, read the placement.
    with queries(default=1, directory=3):
        Album.objects.bulk_create([Album(owner=ada, album_id=1), Album(owner=bob, album_id=2)])
    with queries(default=1, directory=3, photos=1):
        Album(owner=eve, album_id=3).save(force_insert=True)
    # In a test case, no placement is remembered.
    with queries(default=0, directory=1, photos=1):
        Album(owner=eve, album_id=4).save(force_insert=True)


def test_the_setting_turns_it_off() -> None:
    topology = runtime.topology()
    group = replace(topology.groups["photos"], check_new_keys=False)
    runtime.swap(replace(topology, groups={**topology.groups, "photos": group}))
    try:
        with queries(default=0, directory=3, photos=1):
            Album(owner_id=TYPO, album_id=1).save(force_insert=True)
        assert placed(TYPO)
    finally:
        runtime.swap(topology)


def test_a_key_that_is_no_foreign_key_is_not_looked_up() -> None:
    with queries(default=0, directory=3, photos=1):
        Photo(user_id=TYPO, photo_id=1).save(force_insert=True)
