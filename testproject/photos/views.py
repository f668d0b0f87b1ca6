"""The pages. Each names the shard key of what it shows, except the front page, which scatters."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.decorators import login_required
from django.contrib.auth.views import redirect_to_login
from django.core.paginator import Paginator
from django.db.models import Count
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.cache import cache_control
from django.views.decorators.http import require_http_methods, require_safe

from testproject.photos.forms import CommentForm, UploadForm
from testproject.photos.models import Album, Comment, Photo, PhotoOwner
from testproject.photos.pictures import draw
from testproject.photos.publishing import publish

NEWEST = 24
PER_PAGE = 24


def _user(username: str) -> Any:
    return get_object_or_404(get_user_model(), username=username, is_active=True)


@require_safe
def front(request: HttpRequest) -> HttpResponse:
    """The newest photos of all users: all shards are asked, the owners come from one query."""
    newest = Photo.objects.scatter().order_by("-posted_at", "-photo_id")
    photos = newest.prefetch_related("owner")[:NEWEST]
    return render(request, "photos/front.html", {"photos": photos})


@require_safe
def user(request: HttpRequest, username: str) -> HttpResponse:
    owner = _user(username)
    albums = owner.albums.annotate(size=Count("photos")).order_by("title")
    photos = owner.photos.order_by("-posted_at", "-photo_id")
    page = Paginator(photos, PER_PAGE).get_page(request.GET.get("page"))
    return render(request, "photos/user.html", {"owner": owner, "albums": albums, "page": page})


@require_safe
def album(request: HttpRequest, username: str, album_id: int) -> HttpResponse:
    owner = _user(username)
    found = get_object_or_404(Album, owner=owner, pk=album_id)
    # Through the owner, so that each photo knows its owner without a query.
    photos = owner.photos.filter(album=found).order_by("posted_at", "photo_id")
    return render(request, "photos/album.html", {"owner": owner, "album": found, "photos": photos})


@require_http_methods(["GET", "HEAD", "POST"])
def photo(request: HttpRequest, username: str, photo_id: int) -> HttpResponse:
    """A photo with its comments; who is logged in may add one."""
    owner = _user(username)
    found = get_object_or_404(Photo.objects.select_related("album"), owner=owner, pk=photo_id)
    form = CommentForm()
    if request.method == "POST":
        if not request.user.is_authenticated:
            return redirect_to_login(request.path)
        form = CommentForm(
            request.POST, instance=Comment(owner=owner, photo=found, author=request.user)
        )
        if form.is_valid():
            comment = form.save()
            return redirect(f"{request.path}#comment-{comment.pk}")
    comments = (
        found.comments.filter(owner=owner)
        .order_by("posted_at", "comment_id")
        # Authors are in the global database: a query of their own, no join.
        .prefetch_related("author")
    )
    context = {"owner": owner, "photo": found, "comments": comments, "form": form}
    return render(request, "photos/photo.html", context)


@require_safe
def old_photo(request: HttpRequest, photo_id: int) -> HttpResponse:
    """An address of old, without the user: the mapping tells where the photo is now (Y7)."""
    entry = get_object_or_404(PhotoOwner.objects.select_related("owner"), pk=photo_id)
    return redirect("photos:photo", entry.owner.username, photo_id, permanent=True)


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def upload(request: HttpRequest) -> HttpResponse:
    form = UploadForm(request.user, request.POST or None)
    if request.method == "POST" and form.is_valid():
        return redirect(publish(request.user, **form.cleaned_data))
    return render(request, "photos/upload.html", {"form": form})


@require_safe
@cache_control(public=True, max_age=86400, immutable=True)
def picture(request: HttpRequest, photo_id: int) -> HttpResponse:
    """The picture itself, drawn from the id: no file, no query."""
    return HttpResponse(draw(photo_id), content_type="image/svg+xml")
