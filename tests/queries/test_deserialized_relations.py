"""A deserialized row with relations to rows of another shard is refused before it is stored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.core import serializers
from django.db.models.signals import pre_save

from sharded_orm.exceptions import CrossShardRelation
from tests.photos.models import Photo, Tag
from tests.queries.conftest import DATABASES, ONE, TWO

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
