"""Writes to the shard of a user."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sharded_orm
from testproject.activity.models import events
from testproject.activity.recording import photo_posted
from testproject.photos.models import Album, Photo
from testproject.photos.tags import give


def publish(
    owner: Any,
    title: str,
    *,
    album: Album | None = None,
    new_album: str = "",
    tags: Iterable[str] = (),
) -> Photo:
    """Store a photo of ``owner``, with all that belongs to it, in one transaction.

    :param album: one of the owner's albums; or give ``new_album``, the title of an album that is
        created if the owner has none of that name.
    :param tags: return value of :func:`testproject.photos.tags.parse`.

    The event of the photo is on the same shard, so it is there if the photo is.
    """
    with sharded_orm.atomic(Photo, owner=owner):
        if album is None:
            album, _ = Album.objects.get_or_create(owner=owner, title=new_album)
        photo: Photo = Photo.objects.create(owner=owner, album=album, title=title)
        give(photo, tags)
        events.put(photo_posted(photo))
    return photo
