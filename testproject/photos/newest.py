"""The newest photos of many users: one scattered query per page, however far the page is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.contrib.auth import get_user_model
from django.db.models import Q

from testproject.photos.models import Photo

SIZE = 24


@dataclass(frozen=True)
class Page:
    """Photos with their owners loaded."""

    photos: Sequence[Photo]
    #: Value of ``before`` for the next page; empty on the last page.
    older: str
    #: Aliases of shards that did not answer: their photos are missing.
    missing: Sequence[str]


def newest(photos: Any, before: str = "") -> Page:
    """Return a page of ``photos``, a scattering queryset, with one more query for the owners.

    A page says where the next one begins, as an ``OFFSET`` would read all earlier pages on every
    shard. Shards that do not answer are left out, so that users of other shards do not suffer.

    :param before: ``older`` of the page before; an invalid value begins at the first page.
    """
    if (last := _parse(before)) is not None:
        posted_at, photo_id = last
        photos = photos.filter(
            Q(posted_at__lt=posted_at) | Q(posted_at=posted_at, photo_id__lt=photo_id)
        )
    newest_photos = photos.scatter(partial=True).order_by("-posted_at", "-photo_id")[: SIZE + 1]
    rows = list(newest_photos)
    older = _written(rows[SIZE - 1]) if len(rows) > SIZE else ""
    owners = get_user_model().objects.filter(is_active=True).in_bulk({row.owner_id for row in rows})
    shown = [row for row in rows[:SIZE] if row.owner_id in owners]
    for row in shown:
        row.owner = owners[row.owner_id]
    return Page(shown, older, list(newest_photos.failed_shards))


def _written(photo: Photo) -> str:
    return f"{photo.posted_at.isoformat()}_{photo.photo_id}"


def _parse(text: str) -> tuple[datetime, int] | None:
    posted_at, _, photo_id = text.partition("_")
    try:
        when, number = datetime.fromisoformat(posted_at), int(photo_id)
        # In UTC a time of the calendar's first or last day may be out of it.
        parsed = when.astimezone(UTC), number
    except (ValueError, OverflowError):
        return None
    return parsed if when.tzinfo and 0 < number < 2**63 else None
