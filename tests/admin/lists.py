"""An admin site for the tests of lists, actions and deletions, with every option of lists."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.urls import path

from sharded_orm.admin import ShardedModelAdmin
from tests.photos.models import Album, Comment, Event, Person, Photo, Tag

site = admin.AdminSite(name="admin")


class Starred(admin.SimpleListFilter):
    title = "starred"
    parameter_name = "starred"

    def lookups(self, request: Any, model_admin: Any) -> Any:
        return [("yes", "Yes"), ("no", "No")]

    def queryset(self, request: Any, queryset: Any) -> Any:
        if self.value() is None:
            return None
        return queryset.filter(stars__isnull=self.value() == "no")


class NeedsShard(Starred):
    title = "needs a shard"
    parameter_name = "needs"
    needs_shard = True


@admin.register(Person, site=site)
class PersonAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    list_display = ["username"]
    search_fields = ["username"]
    list_editable = ["username"]
    list_display_links = None


@admin.register(Album, site=site)
class AlbumAdmin(ShardedModelAdmin):
    list_display = ["title", "owner"]
    list_filter = [
        "owner",
        ("owner", admin.RelatedOnlyFieldListFilter),
        "owner__username",
    ]
    search_fields = ["title", "=owner__username"]
    raw_id_fields = ["owner"]
    list_per_page = 2


@admin.register(Tag, site=site)
class TagAdmin(ShardedModelAdmin):
    search_fields = ["name"]


@admin.register(Photo, site=site)
class PhotoAdmin(ShardedModelAdmin):
    list_display = ["title", "user_id", "album", "stars", "posted_at"]
    list_filter = ["stars", "album", "tags", "posted_at", Starred, NeedsShard, "album__title"]
    list_editable = ["stars", "album", "user_id"]
    date_hierarchy = "posted_at"
    search_fields = ["title", "tags__name"]
    list_per_page = 3
    actions = ["star", "export", "names_of_all", "fail_on_12", "deny"]
    #: Aliases of the shards for which an action was called.
    called: list[str]

    @admin.action(description="Give five stars", permissions=["change"])
    def star(self, request: HttpRequest, queryset: Any) -> None:
        queryset.update(stars=5)

    @admin.action(description="Export")
    def export(self, request: HttpRequest, queryset: Any) -> HttpResponse:
        queryset.update(stars=1)
        return HttpResponse(",".join(queryset.values_list("title", flat=True)))

    @admin.action(description="Names")
    def names_of_all(self, request: HttpRequest, queryset: Any) -> HttpResponse:
        # Not partial: if a shard goes down now, the action fails and misses no rows.
        assert not queryset._partial
        return HttpResponse(",".join(sorted(photo.title for photo in queryset)))

    names_of_all.across_shards = True  # type: ignore[attr-defined]

    @admin.action(description="Fail on 12")
    def fail_on_12(self, request: HttpRequest, queryset: Any) -> None:
        queryset.update(stars=5)
        if queryset.db == "photos_00012":
            raise ValueError("not here")

    @admin.action(description="Deny", permissions=["nothing"])
    def deny(self, request: HttpRequest, queryset: Any) -> None:
        raise AssertionError("never called")

    def has_nothing_permission(self, request: HttpRequest) -> bool:
        return False


@admin.register(Comment, site=site)
class CommentAdmin(ShardedModelAdmin):
    list_display = ["text", "photo", "author"]
    search_fields = ["text", "author__username"]


@admin.register(Event, site=site)
class EventAdmin(ShardedModelAdmin):
    list_display = ["account", "number"]
    search_fields = ["account"]


urlpatterns = [path("admin/", site.urls)]
