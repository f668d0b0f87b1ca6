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


urlpatterns = [path("admin/", site.urls)]
