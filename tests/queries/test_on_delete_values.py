"""Rows that get an instance by ``on_delete=models.SET(…)``: it must be of their shard and key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db.migrations.writer import MigrationWriter

from sharded_orm.exceptions import CrossKeyRelation, CrossShardRelation
from tests.queries.conftest import DATABASES
from tests.twins.models import REPLACEMENT_FOLDER, Clip, Folder

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


def test_the_value_is_written_into_migrations() -> None:
    on_delete = Clip._meta.get_field("folder").remote_field.on_delete
    text, _ = MigrationWriter.serialize(on_delete)
    assert text == "models.SET(tests.twins.models.folder_of_deleted)"
