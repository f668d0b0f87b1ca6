"""Tags: words of a photo, on the photo's shard, written in one way."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any
from unicodedata import normalize

from django.db.models import Count

from testproject.photos.models import Photo, PhotoTag

MOST = 8
LONGEST = PhotoTag._meta.get_field("text").max_length
_TAG = re.compile(r"\w[\w -]*")


class InvalidTags(ValueError):
    """What somebody entered is no list of tags; the text tells why."""


def parse(text: str) -> list[str]:
    """The tags in a list with commas, each once: ``"#Low tide, dunes"``.

    :raises InvalidTags: too many, too long, or other signs than letters, digits, ``-`` and blanks.
    """
    found = dict.fromkeys(filter(None, map(normal, text.split(","))))
    if len(found) > MOST:
        raise InvalidTags(f"At most {MOST} tags; these are {len(found)}.")
    for tag in found:
        if len(tag) > LONGEST:
            raise InvalidTags(f"“{tag[:LONGEST]}…” is longer than {LONGEST} letters.")
        if not _TAG.fullmatch(tag):
            raise InvalidTags(f"“{tag}”: a tag has letters, digits, hyphens and blanks only.")
    return list(found)


def normal(tag: str) -> str:
    """One way of writing what people take for the same tag."""
    return " ".join(normalize("NFC", tag).lower().strip().removeprefix("#").split())


def give(photo: Photo, tags: Iterable[str]) -> None:
    """Store tags of a new photo: one query, in the transaction that is open on its shard."""
    PhotoTag.objects.bulk_create(
        (PhotoTag(owner_id=photo.owner_id, photo=photo, text=tag) for tag in tags),
        # Databases take more for the same than normal() does: accents, mostly.
        ignore_conflicts=True,
    )


def of_user(owner: Any) -> Any:
    """Tags of a user with the number of photos that have them; one query on one shard."""
    return owner.photo_tags.values("text").annotate(photos=Count("pk")).order_by("-photos", "text")
