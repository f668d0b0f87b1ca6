"""Events of the sample content: the newest of each person."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import get_user_model
from django.core.management import call_command

import sharded_orm
from sharded_orm.contrib.entities import index_states
from testproject.activity.models import events
from testproject.activity.recording import comment_written, photo_posted
from testproject.photos.models import Photo
from testproject.photos.sample import PEOPLE

PHOTOS, COMMENTS = 5, 8


def serve_indexes() -> None:
    """Let pages use the indexes, which is to be said once."""
    if any(index_states.read_state(i) != index_states.SERVED for i in events.indexes):
        call_command("entities", "index", "build", "events", verbosity=0)


def make() -> int:
    """Record the newest photos and comments of each person, unless they are. Return their number."""
    names = [name.split()[0].lower() for name in PEOPLE]
    return sum(map(_record, get_user_model().objects.filter(username__in=names)))


def _record(person: Any) -> int:
    photos = Photo.objects.filter(owner=person).order_by("-posted_at")[:PHOTOS]
    comments = person.written_comments.order_by("-posted_at")[:COMMENTS]
    wanted = [*map(photo_posted, photos), *map(comment_written, comments)]
    with sharded_orm.atomic(events.model, actor_id=person.pk):
        there = events.get_many([event.id for event in wanted], actor_id=person.pk)
        new = [event for event in wanted if event.id not in there]
        for event in new:
            events.put(event)
    return len(new)
