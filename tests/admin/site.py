"""An admin site for the models of tests.photos."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.urls import path

from sharded_orm.admin import ShardedModelAdmin, ShardedStackedInline, ShardedTabularInline
from tests.photos.models import (
    Album,
    Board,
    Comment,
    Event,
    Like,
    Note,
    Person,
    Photo,
    Pin,
    Reading,
    Save,
    Story,
    Tag,
    Tick,
    Visit,
)

site = admin.AdminSite(name="admin")


class AlbumsOfPerson(ShardedTabularInline):
    model = Album
    extra = 1


@admin.register(Person, site=site)
class PersonAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    search_fields = ["username"]
    inlines = [AlbumsOfPerson]


class PhotosOfAlbum(ShardedTabularInline):
    model = Photo
    fields = ["title", "stars", "tags"]
    extra = 1
    show_change_link = True


@admin.register(Album, site=site)
class AlbumAdmin(ShardedModelAdmin):
    list_display = ["title", "owner"]
    search_fields = ["title", "owner__username"]
    raw_id_fields = ["owner"]
    inlines = [PhotosOfAlbum]
    save_as = True


@admin.register(Tag, site=site)
class TagAdmin(ShardedModelAdmin):
    search_fields = ["name"]


class CommentsOfPhoto(ShardedStackedInline):
    model = Comment
    extra = 1


@admin.register(Photo, site=site)
class PhotoAdmin(ShardedModelAdmin):
    list_display = ["title", "user_id", "album", "stars", "posted_at"]
    list_filter = ["stars", "album"]
    list_editable = ["stars"]
    date_hierarchy = "posted_at"
    search_fields = ["title"]
    autocomplete_fields = ["album"]
    filter_horizontal = ["tags"]
    inlines = [CommentsOfPhoto]
    save_as = True
    actions = ["star"]

    @admin.action(description="Give five stars", permissions=["change"])
    def star(self, request: HttpRequest, queryset: Any) -> None:
        queryset.update(stars=5)


@admin.register(Comment, site=site)
class CommentAdmin(ShardedModelAdmin):
    list_display = ["text", "photo", "author"]
    search_fields = ["text", "author__username"]
    raw_id_fields = ["photo", "author"]


@admin.register(Event, site=site)
class EventAdmin(ShardedModelAdmin):
    list_display = ["account", "number"]
    list_filter = ["number"]
    search_fields = ["account"]


@admin.register(Board, site=site)
class BoardAdmin(ShardedModelAdmin):
    search_fields = ["name"]
    raw_id_fields = ["parent"]


@admin.register(Save, site=site)
class SaveAdmin(ShardedModelAdmin):
    raw_id_fields = ["board"]


@admin.register(Note, site=site)
class NoteAdmin(ShardedModelAdmin):
    autocomplete_fields = ["board"]


for model in (Like, Pin, Reading, Story, Tick, Visit):
    site.register(model, ShardedModelAdmin)


urlpatterns = [path("admin/", site.urls)]
