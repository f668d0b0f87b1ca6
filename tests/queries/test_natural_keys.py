"""Natural keys in serialized rows: deserializers that are given a group find rows on its shards."""

from __future__ import annotations

from typing import Any

import pytest
from django.core import serializers
from django.core.serializers.base import DeserializationError

from tests.photos.models import Album, Person, Photo, Tag
from tests.queries.conftest import DATABASES, NEAR, ONE, TWO

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

FORMATS = ("json", "jsonl", "xml", "python")


def dump(kind: str, rows: Any) -> Any:
    return serializers.serialize(
        kind, rows, use_natural_primary_keys=True, use_natural_foreign_keys=True
    )


@pytest.fixture
def tags(placed: None) -> dict[int, Tag]:
    return {key: Tag.objects.create(user_id=key, name="sea") for key in (ONE, NEAR, TWO)}


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_is_found_again_by_its_natural_key(kind: str, tags: dict[int, Tag]) -> None:
    data = dump(kind, list(tags.values()))
    rows = [item.object for item in serializers.deserialize(kind, data, using="photos")]
    assert [(row.user_id, row.pk) for row in rows] == [(key, tags[key].pk) for key in tags]
    for row in rows:
        row.save()
    assert Tag.objects.scatter().count() == len(tags)


@pytest.mark.parametrize("kind", FORMATS)
def test_relations_of_a_row(kind: str, tags: dict[int, Tag]) -> None:
    """To rows of its shard, and to a row of the global database."""
    owner = Person.objects.create(pk=TWO, username="two")
    album = Album.objects.create(owner=owner, title="a")
    photo = Photo.objects.create(user_id=TWO, title="p", album=album)
    photo.tags.add(tags[TWO])
    data = {rows[0]._meta.label: dump(kind, rows) for rows in ([photo], [album])}
    photo.tags.clear()
    for item in serializers.deserialize(kind, data["photos_app.Photo"], using="photos"):
        item.save()
    assert list(Photo.objects.get(user_id=TWO, title="p").tags.all()) == [tags[TWO]]
    (again,) = serializers.deserialize(kind, data["photos_app.Album"])
    assert again.object.owner_id == TWO


def test_a_relation_that_comes_later(placed: None) -> None:
    rows = [
        {
            "model": "photos_app.photo",
            "pk": 1,
            "fields": {"user_id": ONE, "title": "p", "tags": key},
        }
        for key in ([[ONE, "later"]],)
    ]
    (item,) = serializers.deserialize(
        "python", rows, using="photos", handle_forward_references=True
    )
    item.save()
    tag = Tag.objects.create(user_id=ONE, name="later")
    item.save_deferred_fields()
    assert list(Photo.objects.get(user_id=ONE, pk=1).tags.all()) == [tag]


def test_a_natural_key_that_nobody_has(tags: dict[int, Tag]) -> None:
    rows = [
        {
            "model": "photos_app.photo",
            "pk": 1,
            "fields": {"user_id": ONE, "title": "p", "tags": [[ONE, "x"]]},
        }
    ]
    with pytest.raises(DeserializationError, match="Tag matching query does not exist"):
        list(serializers.deserialize("python", rows, using="photos"))
