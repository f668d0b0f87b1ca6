"""Tags: words of a photo, on the photo's shard, normalized."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.db.models import Count

from testproject.photos.models import Photo, PhotoTag
from testproject.photos.words import InvalidTags, check, normal

MOST = 8


def parse(text: str) -> list[str]:
    """Return the tags in a list with commas, each once: ``"#Low tide, dunes"``.

    :raises InvalidTags: too many, too long, or other characters than letters, digits, ``-`` and
        blanks.
    """
    tags = dict.fromkeys(filter(None, map(normal, text.split(","))))
    if len(tags) > MOST:
        raise InvalidTags(f"At most {MOST} tags; these are {len(tags)}.")
    for tag in tags:
        check(tag)
    return list(tags)


def give(photo: Photo, tags: Iterable[str]) -> None:
    """Store tags of a new photo: one query, in the transaction that is open on its shard."""
    PhotoTag.objects.bulk_create(
        (PhotoTag(owner_id=photo.owner_id, photo=photo, text=tag) for tag in tags),
        # Databases treat more words as equal than normal() does: mostly accents.
        ignore_conflicts=True,
    )


def of_user(owner: Any) -> Any:
    """Return a user's tags with the number of photos that have them; one query on one shard."""
    return owner.photo_tags.values("text").annotate(photos=Count("pk")).order_by("-photos", "text")
