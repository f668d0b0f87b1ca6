"""The admin of what is in the global database."""

from __future__ import annotations

from django.contrib import admin

from testproject.movielens.models import Movie


@admin.register(Movie)
class MovieAdmin(admin.ModelAdmin):
    list_display = ["title", "genres"]
    search_fields = ["title"]
