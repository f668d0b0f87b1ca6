"""The admin of what is in the global database."""

from __future__ import annotations

from django.contrib import admin

from testproject.photos.models import PhotoOwner


@admin.register(PhotoOwner)
class PhotoOwnerAdmin(admin.ModelAdmin):
    list_display = ["photo_id", "owner"]
    list_select_related = ["owner"]
    search_fields = ["photo_id", "owner__username"]
    raw_id_fields = ["owner"]
