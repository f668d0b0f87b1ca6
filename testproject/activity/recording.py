"""Records what users do."""

from __future__ import annotations

import logging
from typing import Any
from uuid import UUID, uuid5

from django.db import OperationalError

from sharded_orm.contrib.entities import Entity
from sharded_orm.contrib.entities.exceptions import EntityNotFound
from testproject.activity.models import events

logger = logging.getLogger(__name__)

#: Each event has an id of its own, which what it tells of decides. So it is recorded once.
_NAMESPACE = UUID("6a1f3c9e-2f0b-4f5e-9d43-5a6f0a4ce7d1")


def photo_posted(photo: Any) -> Entity:
    """Return the event of a new photo, to be put into the store."""
    return Entity(
        id=uuid5(_NAMESPACE, f"photo {photo.pk}"),
        kind="photo",
        actor_id=photo.owner_id,
        happened_at=photo.posted_at,
        photo_id=photo.pk,
        title=photo.title,
    )


def comment_written(comment: Any) -> Entity:
    """Return the event of a new comment, or of the author's copy of one."""
    event = Entity(
        id=_comment_event_id(comment.pk),
        kind="comment",
        actor_id=comment.author_id,
        happened_at=comment.posted_at,
        photo_id=comment.photo_id,
        comment_id=comment.pk,
        text=comment.text,
    )
    if comment.owner_id != comment.author_id:
        event["receiver_id"] = comment.owner_id
    return event


def record_comment(comment: Any) -> None:
    """Record a comment that was stored. It stays if its author's shard is down, and has no event then."""
    try:
        events.put(comment_written(comment))
    except OperationalError as exc:
        logger.warning("comment %s has no event: %s", comment.pk, exc)


def forget_comment(author_id: int, comment_id: int) -> None:
    """Delete the event of a comment that was deleted."""
    try:
        events.delete(_comment_event_id(comment_id), actor_id=author_id)
    except EntityNotFound:
        pass
    except OperationalError as exc:
        logger.warning("the event of comment %s stays: %s", comment_id, exc)


def _comment_event_id(comment_id: int) -> UUID:
    return uuid5(_NAMESPACE, f"comment {comment_id}")
