"""The admin of films, and of the ratings and tags of the users on a shard."""

from __future__ import annotations

from django.contrib import admin

from sharded_orm.admin import ShardedModelAdmin
from testproject.movielens.models import Movie, Rating, Tag


@admin.register(Movie)
class MovieAdmin(admin.ModelAdmin):
    list_display = ["title", "genres"]
    search_fields = ["title"]


@admin.register(Rating)
class RatingAdmin(ShardedModelAdmin):
    list_display = ["movie", "stars", "user_id", "rated_at"]
    list_editable = ["stars"]
    list_filter = ["stars"]
    date_hierarchy = "rated_at"
    search_fields = ["movie__title"]
    ordering = ["-rated_at", "rating_id"]
    autocomplete_fields = ["movie"]


@admin.register(Tag)
class TagAdmin(ShardedModelAdmin):
    list_display = ["text", "movie", "user_id", "tagged_at"]
    date_hierarchy = "tagged_at"
    search_fields = ["text", "movie__title"]
    ordering = ["-tagged_at", "tag_id"]
    autocomplete_fields = ["movie"]
