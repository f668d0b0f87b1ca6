"""A deserialized row with relations to rows of another shard is refused before it is stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
from django.core import serializers
from django.core.serializers.base import DeserializedObject
from django.db.models.signals import pre_save

from sharded_orm import runtime
from sharded_orm.exceptions import CrossShardRelation, ShardKeyRequired
from sharded_orm.models.relations.deserialized_rows import install_check
from tests.photos.models import Photo, Tag
from tests.queries.conftest import DATABASES, ONE, TWO, UNPLACED

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]


def deserialized(tags: list[int]) -> Any:
    fields = {"user_id": ONE, "title": "x", "tags": tags}
    text = json.dumps([{"model": "photos_app.photo", "pk": 99, "fields": fields}])
    (item,) = serializers.deserialize("json", text)
    return item


def test_a_relation_to_another_shard_stores_nothing(placed: None) -> None:
    Tag.objects.create(id=7, user_id=TWO, name="t")
    saved: list[Any] = []

    def record(instance: Any, **kwargs: Any) -> None:
        saved.append(instance)

    pre_save.connect(record, sender=Photo)
    try:
        with pytest.raises(CrossShardRelation, match="Tag"):
            deserialized([7]).save()
    finally:
        pre_save.disconnect(record, sender=Photo)
    assert (Photo.objects.scatter().count(), saved) == (0, [])


def test_a_relation_on_the_shard_is_stored(placed: None) -> None:
    Tag.objects.create(id=7, user_id=ONE, name="t")
    item = deserialized([7])
    item.save()
    assert [tag.pk for tag in Photo.objects.get(user_id=ONE, pk=99).tags.all()] == [7]
    item = deserialized([8])
    item.save(save_m2m=False)
    assert item.m2m_data is None


@pytest.mark.parametrize(
    "tag",
    [lambda: 7, lambda: Tag(id=7, user_id=UNPLACED, name="t")],
    ids=["an id", "a new instance"],
)
def test_a_new_key_has_no_rows_to_relate(placed: None, tag: Callable[[], Any]) -> None:
    item = DeserializedObject(Photo(pk=99, user_id=UNPLACED, title="x"), {"tags": [tag()]})
    with pytest.raises(CrossShardRelation, match=r"no Tag with id in \[7\]: .* same shard key"):
        item.save()
    assert runtime.locate("photos", UNPLACED) is None


def test_a_row_without_its_key_is_refused_as_without_relations(placed: None) -> None:
    with pytest.raises(ShardKeyRequired):
        DeserializedObject(Photo(pk=99, title="x"), {"tags": [7]}).save()


def test_relations_from_an_iterator_are_stored(placed: None) -> None:
    Tag.objects.create(id=7, user_id=ONE, name="t")
    row = Photo(pk=99, user_id=ONE, title="x")
    DeserializedObject(row, {"tags": (number for number in [7])}).save()
    assert [tag.pk for tag in row.tags.all()] == [7]


def test_the_check_is_installed_on_a_function_that_another_package_has_wrapped(
    placed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    django: Any = DeserializedObject.save.__wrapped__  # type: ignore[attr-defined]

    @wraps(django)
    def save(*args: Any, **kwargs: Any) -> None:
        django(*args, **kwargs)

    monkeypatch.setattr(DeserializedObject, "save", save)
    install_check()
    with pytest.raises(CrossShardRelation):
        deserialized([7]).save()
    assert not Photo.objects.scatter().exists()
    installed = DeserializedObject.save
    install_check()
    assert DeserializedObject.save is installed
