"""The pages. Each names the shard key of its rows, except those that scatter."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.auth import get_user_model
from django.contrib.auth.decorators import login_required
from django.contrib.auth.views import LoginView, redirect_to_login
from django.core.paginator import Paginator
from django.db import IntegrityError
from django.db.models import Count, Max
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.cache import cache_control
from django.views.decorators.http import (
    condition,
    require_http_methods,
    require_POST,
    require_safe,
)

from testproject.activity.recording import forget_comment, record_comment
from testproject.photos import pictures, tags
from testproject.photos.forms import CommentForm, UploadForm
from testproject.photos.models import Album, Comment, Photo, PhotoTag
from testproject.photos.newest import newest
from testproject.photos.publication import publish
from testproject.photos.words import normal

PER_PAGE = 24
MOST_TAGS = 60


def _user(username: str) -> Any:
    return get_object_or_404(get_user_model(), username=username, is_active=True)


# -- Of all users: these query all shards


@require_safe
def front(request: HttpRequest) -> HttpResponse:
    """The newest photos of all users: one query of all shards, and one for the owners."""
    page = newest(Photo.objects, request.GET.get("before", ""))
    return render(request, "photos/front.html", {"page": page})


@require_safe
def tag(request: HttpRequest, text: str) -> HttpResponse:
    """The newest photos with a tag."""
    tagged = Photo.objects.filter(tags__text=normal(text))
    page = newest(tagged, request.GET.get("before", ""))
    if not page.photos and not page.missing:
        raise Http404
    return render(request, "photos/tag.html", {"tag": normal(text), "page": page})


@require_safe
def all_tags(request: HttpRequest) -> HttpResponse:
    """The most common tags: each shard counts its own, the counts are added up."""
    counted = PhotoTag.objects.scatter(partial=True).values("text").annotate(photos=Count("pk"))
    most_common = counted.order_by("-photos", "text")[:MOST_TAGS]
    context = {
        "tags": sorted(most_common, key=lambda tag: tag["text"]),
        "missing": most_common.failed_shards,
    }
    return render(request, "photos/tags.html", context)


# -- Of one user: these query the user's shard


@require_safe
def user(request: HttpRequest, username: str) -> HttpResponse:
    """A user's stream, with albums and tags."""
    owner = _user(username)
    albums = owner.albums.annotate(size=Count("photos"), cover=Max("photos")).order_by("title")
    photos = owner.photos.order_by("-posted_at", "-photo_id")
    context = {
        "owner": owner,
        "albums": albums,
        "tags": tags.of_user(owner),
        "page": Paginator(photos, PER_PAGE).get_page(request.GET.get("page")),
    }
    return render(request, "photos/user.html", context)


@require_safe
def user_tag(request: HttpRequest, username: str, text: str) -> HttpResponse:
    """A user's photos with a tag."""
    owner = _user(username)
    tagged = owner.photos.filter(tags__text=normal(text))
    photos = tagged.order_by("-posted_at", "-photo_id")
    page = Paginator(photos, PER_PAGE).get_page(request.GET.get("page"))
    if not page.object_list:
        raise Http404
    context = {"owner": owner, "tag": normal(text), "page": page}
    return render(request, "photos/user_tag.html", context)


@require_safe
def user_comments(request: HttpRequest, username: str) -> HttpResponse:
    """A user's comments under photos of all users: the author's copies, on one shard."""
    author = _user(username)
    # Owners are in the global database, so they take a query of their own, no join.
    written = author.written_comments.order_by("-posted_at", "-comment_id")
    page = Paginator(written.prefetch_related("owner"), PER_PAGE).get_page(request.GET.get("page"))
    return render(request, "photos/user_comments.html", {"author": author, "page": page})


@require_safe
def album(request: HttpRequest, username: str, album_id: int) -> HttpResponse:
    owner = _user(username)
    shown_album = get_object_or_404(Album, owner=owner, pk=album_id)
    # Through the owner, so that each photo knows its owner without a query.
    photos = owner.photos.filter(album=shown_album).order_by("posted_at", "photo_id")
    return render(
        request, "photos/album.html", {"owner": owner, "album": shown_album, "photos": photos}
    )


@require_http_methods(["GET", "HEAD", "POST"])
def photo(request: HttpRequest, username: str, photo_id: int) -> HttpResponse:
    """A photo with its tags and comments; a user who is logged in may add a comment."""
    owner = _user(username)
    shown_photo = get_object_or_404(Photo.objects.select_related("album"), owner=owner, pk=photo_id)
    # Not request.path: that is decoded.
    address = reverse("photos:photo", args=[username, photo_id])
    form = CommentForm()
    if request.method == "POST":
        if not request.user.is_authenticated:
            return redirect_to_login(address)
        form = CommentForm(
            request.POST, instance=Comment(owner=owner, photo=shown_photo, author=request.user)
        )
        if form.is_valid():
            comment = form.save(commit=False)
            try:
                comment.save(force_insert=True)
            except IntegrityError:
                # The photo may have been deleted meanwhile, with its tags and comments.
                get_object_or_404(Photo.objects.uncached(), owner=owner, pk=photo_id)
                raise
            record_comment(comment)
            return redirect(f"{address}#comment-{comment.pk}")
    shown = shown_photo.comments.filter(owner=owner).order_by("posted_at", "comment_id")
    context = {
        "owner": owner,
        "photo": shown_photo,
        "tags": shown_photo.tags.filter(owner=owner).order_by("text"),
        # Authors are in the global database, so they take a query of their own, no join.
        "comments": shown.prefetch_related("author"),
        "form": form,
    }
    return render(request, "photos/photo.html", context)


@require_POST
def delete_comment(
    request: HttpRequest, username: str, photo_id: int, comment_id: int
) -> HttpResponse:
    """Delete a comment; allowed for its author, and for the owner of the photo."""
    if not request.user.is_authenticated:
        # Not to this address: after the login it would be fetched, and it accepts POST only.
        return redirect_to_login(reverse("photos:photo", args=[username, photo_id]))
    comment = get_object_or_404(
        Comment, owner=_user(username), photo=photo_id, comment_id=comment_id
    )
    if request.user.pk not in (comment.author_id, comment.owner_id):
        raise Http404
    comment.delete()
    forget_comment(comment.author_id, comment_id)
    messages.success(request, "The comment is deleted.")
    return redirect("photos:photo", username, photo_id)


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def upload(request: HttpRequest) -> HttpResponse:
    form = UploadForm(request.user, request.POST or None)
    if request.method == "POST" and form.is_valid():
        published = publish(request.user, **form.cleaned_data)
        messages.success(request, "Your photo is published.")
        return redirect(published)
    return render(request, "photos/upload.html", {"form": form})


# -- These need no shard


class Login(LoginView):
    redirect_authenticated_user = True

    def get_redirect_url(self) -> str:
        """Return another page than the login, which Django would treat as a programming error."""
        address: str = super().get_redirect_url()
        return "" if address == self.request.path else address


@require_safe
def old_photo(request: HttpRequest, photo_id: int) -> HttpResponse:
    """An old address without the user: a lookup finds the shard of the photo (Y7)."""
    return redirect(get_object_or_404(Photo, photo_id=photo_id), permanent=True)


def _etag(request: HttpRequest, photo_id: int, width: int) -> str:
    return f'"{pictures.VERSION}-{photo_id}-{width}"'


@require_safe
@cache_control(public=True, max_age=86400)
@condition(etag_func=_etag)
def picture(request: HttpRequest, photo_id: int, width: int) -> HttpResponse:
    """The picture itself, drawn from the id if there is such a photo.

    :raises pictures.TooBusy: too many others are being drawn.
    """
    if width not in pictures.WIDTHS:
        raise Http404
    if not Photo.objects.filter(photo_id=photo_id).exists():
        raise Http404
    return HttpResponse(pictures.draw(photo_id, width), content_type="image/webp")
