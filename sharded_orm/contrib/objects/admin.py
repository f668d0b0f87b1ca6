"""The admin of objects."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _

from sharded_orm.admin import ShardedModelAdmin
from sharded_orm.contrib.objects.exceptions import ConcurrentEdit
from sharded_orm.contrib.objects.forms import ObjectForm


class ObjectAdmin(ShardedModelAdmin):
    """``ShardedModelAdmin`` for objects: ``list_display`` and ``fields`` may name fields of the body.

    Deleting sets ``active`` to False. Rows cannot be sorted, filtered or searched by fields of the body.
    """

    form = ObjectForm
    readonly_fields = ("ts",)

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
