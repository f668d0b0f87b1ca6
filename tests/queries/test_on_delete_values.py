"""Rows that get an instance by ``on_delete=models.SET(…)``: it must be of their shard and key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import models
from django.db.migrations.writer import MigrationWriter
from django.db.models.signals import pre_delete
from django.test.utils import isolate_apps

from sharded_orm.exceptions import CrossKeyRelation, CrossShardRelation, ShardKeyChanged
from sharded_orm.models import ShardedModel
from tests.queries.conftest import DATABASES
from tests.twins.models import (
    REPLACEMENT_DRAWER,
    REPLACEMENT_FOLDER,
    Clip,
    Desk,
    Drawer,
    Folder,
    Letter,
    ShardedSheet,
)
from tests.versions import HAS_DATABASE_ON_DELETE

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

#: Two keys of one shard, and one of another shard.
KEY, NEAR_KEY, OTHER_KEY = 1, 9, 2

DELETE: dict[str, Callable[[], Any]] = {
    "row": lambda: Folder.objects.get(owner=KEY, pk=KEY).delete(),
    "queryset": lambda: Folder.objects.filter(owner=KEY, pk=KEY).delete(),
    "several shards": lambda: Folder.objects.filter(owner__in=[KEY, OTHER_KEY], pk__lt=9).delete(),
}


@pytest.fixture
def clips() -> None:
    for key in (KEY, OTHER_KEY):
        Clip.objects.create(id=key, owner=key, folder=Folder.objects.create(id=key, owner=key))


def _folders() -> list[tuple[int, int]]:
    return sorted(Clip.objects.scatter().values_list("pk", "folder_id"))


@pytest.mark.usefixtures("clips")
@pytest.mark.parametrize("delete", DELETE.values(), ids=DELETE)
@pytest.mark.parametrize(
    ("key", "error"), [(NEAR_KEY, CrossKeyRelation), (OTHER_KEY, CrossShardRelation)]
)
def test_an_instance_of_another_key_or_shard_is_refused_before_anything_is_deleted(
    key: int, error: type[Exception], delete: Callable[[], Any]
) -> None:
    Folder.objects.create(id=REPLACEMENT_FOLDER, owner=key)
    with pytest.raises(error, match="same shard key"):
        delete()
    assert _folders() == [(KEY, KEY), (OTHER_KEY, OTHER_KEY)]
    assert Folder.objects.scatter().count() == 3


@pytest.mark.usefixtures("clips")
def test_an_instance_of_the_same_key_is_set() -> None:
    Folder.objects.create(id=REPLACEMENT_FOLDER, owner=KEY)
    assert DELETE["row"]() == (1, {"twins.Folder": 1})
    assert _folders() == [(KEY, REPLACEMENT_FOLDER), (OTHER_KEY, OTHER_KEY)]


@pytest.fixture(params=[False, True], ids=["without their rows", "with their rows"])
def letters_are_read(request: pytest.FixtureRequest) -> Iterator[None]:
    """Django reads the letters that it deletes if a signal needs them."""

    def receive(**kwargs: Any) -> None:
        pass

    if request.param:
        pre_delete.connect(receive, sender=Letter)
    yield
    pre_delete.disconnect(receive, sender=Letter)


def _desks(*keys: int) -> None:
    for key in keys:
        desk = Desk.objects.create(id=key, owner=key)
        drawer = Drawer.objects.create(id=key, owner=key, desk=desk)
        Letter.objects.create(id=key, owner=key, desk=desk, drawer=drawer)
    near = Desk.objects.create(id=NEAR_KEY, owner=NEAR_KEY)
    Drawer.objects.create(id=REPLACEMENT_DRAWER, owner=NEAR_KEY, desk=near)


@pytest.mark.usefixtures("letters_are_read")
def test_rows_that_the_same_deletion_deletes_may_get_an_instance_of_another_key() -> None:
    _desks(KEY)
    counts = {"twins.Desk": 1, "twins.Drawer": 1, "twins.Letter": 1}
    assert Desk.objects.get(owner=KEY, pk=KEY).delete() == (3, counts)
    assert not Letter.objects.scatter().exists()
    assert Drawer.objects.scatter().get().pk == REPLACEMENT_DRAWER


@pytest.mark.usefixtures("letters_are_read")
def test_other_rows_of_the_same_deletion_are_refused() -> None:
    _desks(KEY)
    kept = Desk.objects.create(id=3, owner=KEY)
    Letter.objects.create(id=3, owner=KEY, desk=kept, drawer_id=KEY)
    with pytest.raises(CrossKeyRelation, match="same shard key"):
        Desk.objects.get(owner=KEY, pk=KEY).delete()
    assert sorted(Letter.objects.scatter().values_list("pk", "drawer_id")) == [(1, KEY), (3, KEY)]


@pytest.mark.usefixtures("letters_are_read")
def test_an_instance_of_another_shard_is_refused_for_all_rows() -> None:
    _desks(KEY, OTHER_KEY)
    with pytest.raises(CrossShardRelation, match="same shard key"):
        Desk.objects.filter(pk__lt=NEAR_KEY).scatter().delete()
    assert Letter.objects.scatter().count() == 2
    assert Desk.objects.scatter().count() == 3


KEY_VALUES: dict[str, Any] = {
    "SET of a function": models.SET(int),
    "SET": models.SET(5),
    "SET_DEFAULT": models.SET_DEFAULT,
    "SET_NULL": models.SET_NULL,
    **{
        name: getattr(models, name)
        for name in ("DB_SET_DEFAULT", "DB_SET_NULL")
        if HAS_DATABASE_ON_DELETE
    },
}


@pytest.mark.parametrize("on_delete", KEY_VALUES.values(), ids=KEY_VALUES)
def test_a_deletion_never_writes_another_shard_key(on_delete: Any) -> None:
    # The models have no tables. So each query would raise another error.
    with isolate_apps("tests.twins"):

        class Wing(ShardedSheet):
            class Meta:
                app_label = "twins"

        class Hall(ShardedSheet):
            wing = models.ForeignKey(Wing, models.CASCADE, related_name="halls")

            class Meta:
                app_label = "twins"

        class Pin(ShardedModel):
            id = models.BigIntegerField(primary_key=True)
            hall = models.ForeignKey(Hall, on_delete, default=5, db_default=5)

            class Meta:
                app_label = "twins"

            class ShardMeta:
                group = "events"
                shard_key = "hall"

        deletions: list[Callable[[], Any]] = [
            Hall(id=KEY, owner=KEY).delete,
            Wing(id=KEY, owner=KEY).delete,
            Hall.objects.filter(owner=KEY).delete,
            Hall.objects.using("events_00001").delete,
            Wing.objects.scatter().delete,
        ]
        for delete in deletions:
            with pytest.raises(ShardKeyChanged, match="cannot set 'hall' of Pin"):
                delete()


def test_the_value_is_written_into_migrations() -> None:
    on_delete = Clip._meta.get_field("folder").remote_field.on_delete
    text, _ = MigrationWriter.serialize(on_delete)
    assert text == "models.SET(tests.twins.models.folder_of_deleted)"
