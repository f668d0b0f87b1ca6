"""The admin of objects, models whose fields are kept in a JSON column, the body."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.admin.utils import flatten_fieldsets
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _

from sharded_orm.admin import ShardedModelAdmin
from sharded_orm.contrib.objects.exceptions import ConcurrentEdit, InvalidObjectType
from sharded_orm.contrib.objects.forms import ObjectForm


class ObjectAdmin(ShardedModelAdmin):
    """``ShardedModelAdmin`` for objects: ``list_display`` and ``fields`` may name fields of the body.

    Deleting sets ``active`` to False. Rows cannot be sorted, filtered or searched by fields of the body,
    and not be edited in the list.

    :raises InvalidObjectType: ``list_editable`` is set, or ``form`` does not compare versions.
    """

    form = ObjectForm
    readonly_fields = ("ts",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.list_editable:
            raise InvalidObjectType(
                f"{type(self).__name__}.list_editable is {self.list_editable!r}, but the forms in a list do"
                " not know the versions that the visitor has seen. Leave it out."
            )
        if not issubclass(self.form, ObjectForm):
            raise InvalidObjectType(
                f"{type(self).__name__}.form is {self.form.__name__!r}, which does not compare versions."
                " Derive it from ObjectForm."
            )

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        fieldsets = list(super().get_fieldsets(request, obj))
        names = flatten_fieldsets(fieldsets)
        if obj is None or "object_version" in names or not fieldsets:
            return fieldsets
        if not self.has_change_permission(request, obj):
            return fieldsets
        title, options = fieldsets[-1]
        shown = {**options, "fields": [*options["fields"], "object_version"]}
        return [*fieldsets[:-1], (title, shown)]

    def get_sortable_by(self, request: HttpRequest) -> Any:
        body = {field.name for field in self.model.body_fields()}
        return [name for name in super().get_sortable_by(request) if name not in body]

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: Any = None,
    ) -> HttpResponse:
        try:
            answer: HttpResponse = super().changeform_view(
                request, object_id, form_url, extra_context
            )
            return answer
        except ConcurrentEdit:
            text = _("Somebody else has changed this at the same time. Nothing was saved.")
            self.message_user(request, text, messages.ERROR)
            return HttpResponseRedirect(request.get_full_path())
