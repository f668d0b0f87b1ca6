"""The admin, as docs/howto/admin.md declares it."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from import_export.admin import ImportExportMixin

from sharded_orm.admin import ShardedModelAdmin, ShardedTabularInline
from tests.helpdesk.models import Agent, Attachment, Case, Message, Profile, Tag, Tenant
from tests.helpdesk.resources import CaseResource


@admin.register(Tenant)
class TenantAdmin(admin.ModelAdmin):
    search_fields = ["name"]
    prepopulated_fields = {"slug": ["name"]}


@admin.register(Agent)
class AgentAdmin(admin.ModelAdmin):
    list_display = ["user", "tenant"]
    search_fields = ["user__username"]


class MessagesOfCase(ShardedTabularInline):
    model = Message
    fields = ["text", "author"]
    extra = 1


@admin.register(Case)
class CaseAdmin(ImportExportMixin, ShardedModelAdmin):
    resource_classes = [CaseResource]
    list_display = ["subject", "tenant", "status", "opened_at"]
    list_filter = ["status"]
    search_fields = ["subject", "tenant__name"]
    date_hierarchy = "opened_at"
    autocomplete_fields = ["tenant", "assignee"]
    filter_horizontal = ["tags"]
    inlines = [MessagesOfCase]
    actions = ["close"]

    @admin.action(description="Close", permissions=["change"])
    def close(self, request: HttpRequest, queryset: Any) -> None:
        queryset.update(status=Case.Status.CLOSED)


@admin.register(Tag)
class TagAdmin(ShardedModelAdmin):
    search_fields = ["name"]


admin.site.register([Message, Attachment, Profile], ShardedModelAdmin)
