"""The admin of the photo site: shard by shard, and over all of them."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import Count
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.timezone import now

from sharded_orm.admin import ShardedModelAdmin, ShardedStackedInline, ShardedTabularInline
from testproject.photos.models import (
    Album,
    Comment,
    Photo,
    PhotoAddress,
    PhotoTag,
    WrittenComment,
)
from testproject.photos.pictures import WIDTHS


def _picture(photo_id: int | None, description: str, width: int) -> str:
    if photo_id is None:
        return ""
    source = reverse("photos:picture", args=[photo_id, WIDTHS[0]])
    # With width and height, so that nothing moves while it loads.
    return format_html(
        '<img src="{}" alt="{}" width="{}" height="{}" loading="lazy">',
        source, description, width, width * 3 // 4,
    )  # fmt: skip


class _PictureMixin:
    """Adds a small picture, as a column and on the row's page."""

    @admin.display(description="picture")
    def picture(self, photo: Any) -> str:
        return _picture(photo.photo_id, photo.description, 80)


class PhotosOfAlbum(_PictureMixin, ShardedTabularInline):
    model = Photo
    fields = ["picture", "title", "posted_at"]
    readonly_fields = ["picture"]
    ordering = ["-posted_at"]
    extra = 0
    show_change_link = True


@admin.register(Album)
class AlbumAdmin(ShardedModelAdmin):
    list_display = ["title", "owner", "photos_in_it", "created_at"]
    date_hierarchy = "created_at"
    search_fields = ["title", "owner__username"]
    autocomplete_fields = ["owner"]
    ordering = ["-created_at", "album_id"]
    inlines = [PhotosOfAlbum]

    def get_queryset(self, request: HttpRequest) -> Any:
        rows = super().get_queryset(request)
        # Counted on the shard; on a page of all shards, each shard would have to count.
        return rows if self.focus(request).everywhere else rows.annotate(_photos=Count("photos"))

    @admin.display(description="photos", empty_value="…")
    def photos_in_it(self, album: Any) -> int | None:
        return getattr(album, "_photos", None)


class TagsOfPhoto(ShardedTabularInline):
    model = PhotoTag
    extra = 1


class CommentsOfPhoto(ShardedStackedInline):
    model = Comment
    fields = ["author", "text", "posted_at"]
    autocomplete_fields = ["author"]
    ordering = ["posted_at"]
    extra = 0


@admin.register(Photo)
class PhotoAdmin(_PictureMixin, ShardedModelAdmin):
    list_display = ["picture", "title", "owner", "album", "posted_at"]
    list_display_links = ["picture"]
    list_editable = ["title"]
    list_filter = ["posted_at", "album"]
    list_per_page = 50
    list_select_related = ["album"]
    date_hierarchy = "posted_at"
    search_fields = ["title", "owner__username"]
    ordering = ["-posted_at", "photo_id"]
    fields = ["picture", "owner", "album", "title", "posted_at"]
    readonly_fields = ["picture"]
    autocomplete_fields = ["owner", "album"]
    inlines = [TagsOfPhoto, CommentsOfPhoto]
    actions = ["show_as_new"]
    save_as = True

    @admin.action(description="Show as new: posted now", permissions=["change"])
    def show_as_new(self, request: HttpRequest, queryset: Any) -> None:
        queryset.update(posted_at=now())


@admin.register(PhotoTag)
class PhotoTagAdmin(ShardedModelAdmin):
    list_display = ["text", "photo", "owner"]
    list_select_related = ["photo"]
    search_fields = ["text"]
    ordering = ["text", "tag_id"]
    raw_id_fields = ["owner", "photo"]


@admin.register(Comment)
class CommentAdmin(ShardedModelAdmin):
    list_display = ["__str__", "author", "photo", "owner", "posted_at"]
    list_select_related = ["photo"]
    date_hierarchy = "posted_at"
    search_fields = ["text", "author__username"]
    ordering = ["-posted_at", "comment_id"]
    raw_id_fields = ["owner", "photo", "author"]


@admin.register(WrittenComment)
class WrittenCommentAdmin(ShardedModelAdmin):
    """A mirror follows the comment, which is with the photo's owner. So its pages are read-only."""

    list_display = ["__str__", "picture", "author", "owner", "posted_at"]
    date_hierarchy = "posted_at"
    search_fields = ["text", "author__username"]
    ordering = ["-posted_at", "comment_id"]

    @admin.display(description="picture")
    def picture(self, comment: Any) -> str:
        return _picture(comment.photo_id, comment.description, 80)


@admin.register(PhotoAddress)
class PhotoAddressAdmin(ShardedModelAdmin):
    """Only the lookup writes addresses."""

    list_display = ["value", "key"]
    search_fields = ["=value"]
    ordering = ["value"]
