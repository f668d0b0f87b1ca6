"""Read-only pages of entities in the admin. To change properties, use ``store.put()``.

When this module is imported, it registers an admin page for each store of the project, except those
for which the project has registered one.
"""

from __future__ import annotations

import json
from typing import Any

from django.contrib import admin
from django.core.serializers.json import DjangoJSONEncoder
from django.http import HttpRequest
from django.utils.html import format_html

from sharded_orm.admin import ShardedModelAdmin
from sharded_orm.contrib.entities.entity import as_uuid
from sharded_orm.contrib.entities.exceptions import InvalidEntityId
from sharded_orm.contrib.entities.properties import decode
from sharded_orm.contrib.entities.store import DataStore, stores

#: In a list of entities, the properties of an entity are cut off after this number of characters.
_SUMMARY = 120


class EntityAdmin(ShardedModelAdmin):
    """The read-only admin pages of the entities of one store.

    To show other columns, derive a class from this one and register it for the store's model, such
    as ``feed.model``.
    """

    list_display = ("id", "updated", "version", "summary")
    ordering = ("-added_id",)
    search_fields = ("id",)
    search_help_text = "The id of an entity."

    @property
    def store(self) -> DataStore:
        return next(store for store in stores.values() if store.model is self.model)

    def get_search_results(
        self, request: HttpRequest, queryset: Any, search_term: str
    ) -> tuple[Any, bool]:
        if not search_term.strip():
            return queryset, False
        try:
            return queryset.filter(id=as_uuid(search_term.strip())), False
        except InvalidEntityId:
            return queryset.none(), False

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest) -> bool:
        """Refuse lookups by the body, to which Django answers with status 400.

        The body is compressed, so that no text in a URL can be compared with it.
        """
        if lookup.split("__")[0] == "body":
            return False
        return bool(super().lookup_allowed(lookup, value, request))

    def get_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        key = () if self.store.shard_on is None else (self.store.shard_on,)
        return ("id", *key, "added_id", "updated", "version", "marked_at", "all_properties")

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        return self.get_fields(request, obj)

    @admin.display(description="properties")
    def summary(self, row: Any) -> str:
        text = self._text(row, None)
        return text if len(text) <= _SUMMARY else f"{text[:_SUMMARY]}…"

    @admin.display(description="properties")
    def all_properties(self, row: Any) -> str:
        return format_html("<pre>{}</pre>", self._text(row, 2))

    def _text(self, row: Any, indent: int | None) -> str:
        body = bytes(row.body)
        if not body:
            return "deleted; the cleaner has not removed its index rows yet"
        try:
            properties = decode(self.store.fields, body)
        except ValueError as exc:
            return f"damaged: {exc}"
        try:
            text = json.dumps(properties, cls=DjangoJSONEncoder, indent=indent, ensure_ascii=False)
        except RecursionError:
            return "nested too deeply to be shown"
        # JSON may have half of a pair of characters, which no page can have.
        return text.encode(errors="backslashreplace").decode()

    def has_add_permission(self, request: HttpRequest, *args: Any) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


for _store in stores.values():
    if not admin.site.is_registered(_store.model):
        admin.site.register(_store.model, EntityAdmin)
