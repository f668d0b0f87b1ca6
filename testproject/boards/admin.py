"""The admin of boards."""

from __future__ import annotations

from django.contrib import admin

from sharded_orm.admin import ShardedModelAdmin
from sharded_orm.contrib.objects.admin import ObjectAdmin
from testproject.boards.models import (
    Board,
    BoardPins,
    Member,
    MemberBoards,
    MembersByUser,
    Pin,
)


@admin.register(Member)
class MemberAdmin(ObjectAdmin):
    list_display = ["username", "user_id", "ts"]


@admin.register(Board)
class BoardAdmin(ObjectAdmin):
    list_display = ["title", "member_id", "cover", "ts"]
    ordering = ["-ts", "id"]


@admin.register(Pin)
class PinAdmin(ObjectAdmin):
    list_display = ["id", "board_id", "photo_id", "note", "ts"]
    ordering = ["-ts", "id"]


@admin.register(MemberBoards, BoardPins)
class EntryAdmin(ShardedModelAdmin):
    list_display = ["source_id", "target_id", "sequence"]
    ordering = ["-sequence", "id"]


@admin.register(MembersByUser)
class MembersByUserAdmin(ShardedModelAdmin):
    list_display = ["value", "target_id"]
