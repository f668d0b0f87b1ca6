"""The admin of the objects of the tests."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from sharded_orm.contrib.objects.admin import ObjectAdmin
from tests.pinboards.models import Board, Pin

site = admin.AdminSite(name="pinboards")


@admin.register(Pin, site=site)
class PinAdmin(ObjectAdmin):
    list_display = ("id", "board_id", "note", "ts")


@admin.register(Board, site=site)
class BoardAdmin(ObjectAdmin):
    list_display = ("name",)


#: A site whose forms name their fields.
short = admin.AdminSite(name="short")


@admin.register(Pin, site=short)
class ShortPinAdmin(ObjectAdmin):
    fieldsets = ((None, {"fields": ("note",)}), ("More", {"fields": ("link", "ts")}))


urlpatterns = [path("admin/", site.urls), path("short/", short.urls)]
