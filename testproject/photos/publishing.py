"""Writes that touch the shard of a user and the global database."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.db import transaction

import sharded_orm
from testproject.photos.models import Album, Photo, PhotoOwner
from testproject.photos.tags import give


def publish(
    owner: Any,
    title: str,
    *,
    album: Album | None = None,
    new_album: str = "",
    tags: Iterable[str] = (),
) -> Photo:
    """Store a photo of ``owner`` and enter it in the mapping of old addresses.

    :param album: one of the owner's albums; or ``new_album``, the title of one that is
        made if the owner has none of that name.
    :param tags: as :func:`testproject.photos.tags.parse` gives them.

    The two transactions are open at once and commit one after the other (Y5), the
    photo last: what a crash in between can leave is a mapping to no photo, which reads
    as "not found".
    """
    with sharded_orm.atomic(Photo, owner=owner), transaction.atomic():
        if album is None:
            album, _ = Album.objects.get_or_create(owner=owner, title=new_album)
        photo: Photo = Photo.objects.create(owner=owner, album=album, title=title)
        give(photo, tags)
        PhotoOwner.objects.create(photo_id=photo.photo_id, owner=owner)
    return photo
