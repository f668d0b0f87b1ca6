"""Yupoo's cache as published (Y13-Y15), written with Django's API as an application would.

An object is stored under its key. A list of ids is stored under the digest of its query and
the user's revision, which every write changes; one ``get_many`` then reads the objects. This
cache is here to be timed only: it may serve old rows, as it lacks every precaution against it.
"""

from __future__ import annotations

import hashlib
import uuid
from typing import Any

from django.core.cache import cache
from django.db.models import QuerySet
from django.db.models.signals import post_delete, post_save

from tests.benchmarks.cache.stock.models import Photo


def object_key(user: int, pk: int) -> str:
    return f"Photo-{user}-{pk}"


def revision_key(user: int) -> str:
    return f"Photo-{user}-revision"


def get(user: int, pk: int) -> Photo:
    """Return the photo ``pk`` of ``user``."""
    key = object_key(user, pk)
    photo: Photo | None = cache.get(key)
    if photo is None:
        photo = Photo.objects.get(pk=pk)
        cache.set(key, photo)
    return photo


def photos(user: int, query: QuerySet[Photo]) -> list[Photo]:
    """Return the photos of ``query``; all of them belong to ``user``."""
    revision = cache.get(revision_key(user))
    if revision is None:
        revision = change_revision(user)
    sql = repr(query.query.sql_with_params()).encode()
    digest = hashlib.md5(sql, usedforsecurity=False).hexdigest()
    key = f"Photo-list-{user}-{digest}-{revision}"
    ids: list[int] | None = cache.get(key)
    if ids is None:
        rows = list(query)
        cache.set(key, [row.pk for row in rows])
        cache.set_many({object_key(user, row.pk): row for row in rows})
        return rows
    names = [object_key(user, pk) for pk in ids]
    photos_by_name = cache.get_many(names)
    missing = [pk for pk, name in zip(ids, names, strict=True) if name not in photos_by_name]
    if missing:
        fresh = {object_key(user, row.pk): row for row in Photo.objects.filter(pk__in=missing)}
        cache.set_many(fresh)
        photos_by_name.update(fresh)
    return [photos_by_name[name] for name in names if name in photos_by_name]


def change_revision(user: int) -> str:
    revision = uuid.uuid4().hex
    cache.set(revision_key(user), revision)
    return revision


def forget(instance: Photo, **signal: Any) -> None:
    """Invalidate the cache after a write of a photo."""
    cache.delete(object_key(instance.user_id, instance.pk))
    change_revision(instance.user_id)


def connect() -> None:
    post_save.connect(forget, sender=Photo)
    post_delete.connect(forget, sender=Photo)
