"""The admin of the objects of the tests."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from sharded_orm.contrib.objects.admin import ObjectAdmin
from tests.pinboards.models import Board, Everything, Pin

site = admin.AdminSite(name="pinboards")


@admin.register(Pin, site=site)
class PinAdmin(ObjectAdmin):
    list_display = ("id", "board_id", "note", "ts")


@admin.register(Board, site=site)
class BoardAdmin(ObjectAdmin):
    list_display = ("name",)


@admin.register(Everything, site=site)
class EverythingAdmin(ObjectAdmin):
    list_display = ("id", "title")


#: A site whose forms name their fields.
short = admin.AdminSite(name="short")


@admin.register(Pin, site=short)
class ShortPinAdmin(ObjectAdmin):
    list_display = ("id", "board", lambda pin: pin.note.upper(), "is_long")
    fieldsets = ((None, {"fields": ("note",)}), ("More", {"fields": ("link", "ts")}))

    @admin.display(boolean=True)
    def is_long(self, pin: Pin) -> bool:
        return len(pin.note) > 10


urlpatterns = [path("admin/", site.urls), path("short/", short.urls)]
