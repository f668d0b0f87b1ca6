"""The activity of a user: what the user did, and what others did with the user's photos."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import get_user_model
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_safe

from sharded_orm.contrib.entities import Index
from sharded_orm.contrib.entities.exceptions import InvalidIndexCursor
from testproject.activity.models import by_actor, by_receiver
from testproject.photos.models import Photo
from testproject.photos.scenes import scene

PER_PAGE = 20


@require_safe
def of_user(request: HttpRequest, username: str) -> HttpResponse:
    """What a user did: the index and the events are on the user's shard."""
    return _page(request, username, by_actor, "actor_id")


@require_safe
def around_user(request: HttpRequest, username: str) -> HttpResponse:
    """What others did with a user's photos: the index is on the user's shard, and the events are on theirs."""
    return _page(request, username, by_receiver, "receiver_id")


def _page(request: HttpRequest, username: str, index: Index, name: str) -> HttpResponse:
    users = get_user_model().objects.filter(is_active=True)
    shown_user = get_object_or_404(users, username=username)
    try:
        page = index.get_all(
            limit=PER_PAGE, after=request.GET.get("after") or None, **{name: shown_user.pk}
        )
    except InvalidIndexCursor as exc:
        raise Http404 from exc
    # A photo may have been deleted since, or be on a shard that does not answer.
    named = {event["photo_id"] for event in page}
    found = Photo.objects.filter(photo_id__in=named).only("photo_id", "owner").scatter(partial=True)
    photos = {photo.photo_id: photo for photo in found}
    owner_ids = {photo.owner_id for photo in photos.values()}
    known = users.in_bulk({*owner_ids, *(event["actor_id"] for event in page)})
    shown: list[dict[str, Any]] = []
    for event in page:
        photo = photos.get(event["photo_id"])
        owner = known.get(photo.owner_id) if photo is not None else None
        actor = known.get(event["actor_id"])
        if owner is not None and actor is not None:
            description = scene(event["photo_id"]).description
            shown.append({**event, "actor": actor, "owner": owner, "description": description})
    context = {
        "owner": shown_user,
        "events": shown,
        "after": page.after,
        "is_first": "after" not in request.GET,
        "around": index is by_receiver,
    }
    return render(request, "activity/user.html", context)
