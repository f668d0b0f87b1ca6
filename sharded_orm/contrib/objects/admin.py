"""The admin of objects, models whose fields are kept in a JSON column, the body."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.utils import (
    display_for_field,
    display_for_value,
    flatten_fieldsets,
    label_for_field,
    lookup_field,
)
from django.core.exceptions import ObjectDoesNotExist
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy as _lazy

from sharded_orm.admin import ShardedModelAdmin
from sharded_orm.admin.changelist import ShardedChangeList
from sharded_orm.contrib.objects.exceptions import (
    ConcurrentEdit,
    DamagedObject,
    InvalidObjectType,
)
from sharded_orm.contrib.objects.forms import ObjectForm


class ObjectChangeList(ShardedChangeList):
    """The list of objects in the admin.

    Rows cannot be sorted by fields of the body. If the address of the list asks for such an order,
    it is ignored. Objects whose bodies cannot be read are also listed. Their columns say "damaged",
    and a note on the page has the error.
    """

    def get_ordering_field(self, field_name: Any) -> Any:
        if field_name in _names_in_body(self.model):
            return None
        return super().get_ordering_field(field_name)

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        errors = [error for row in self.result_list if (error := self._damage(row)) is not None]
        if not errors:
            return
        self.notes += dict.fromkeys(str(error) for error in errors)
        unchanged = {"action_checkbox", *(field.name for field in self.lookup_opts.concrete_fields)}
        columns = {name: self._column(name) for name in self.list_display if name not in unchanged}
        self.list_display = [columns.get(name, name) for name in self.list_display]
        if self.list_display_links:
            self.list_display_links = [columns.get(each, each) for each in self.list_display_links]

    def _damage(self, row: Any) -> DamagedObject | None:
        """Return the error of an object whose body cannot be read; None if it can be read.

        If a column of the list shows a reference, the object to which it leads is also read,
        because it may be damaged as well.
        """
        if "data" in row.get_deferred_fields():
            return None
        try:
            for field in row.body_fields():
                field.read(row)
                if field.name != field.attname and field.name in self.list_display:
                    with suppress(ObjectDoesNotExist):
                        getattr(row, field.name)
        except DamagedObject as exc:
            return exc
        return None

    def _column(self, name: Any) -> Any:
        """Return a column for ``list_display`` that shows what the column ``name`` shows, or
        "damaged" if the object cannot be read.
        """
        model_admin: Any = self.model_admin

        def column(row: Any) -> Any:
            try:
                field, attr, value = lookup_field(name, row, model_admin)
            except DamagedObject:
                return _("damaged")
            empty = model_admin.get_empty_value_display()
            empty = getattr(attr, "empty_value_display", empty)
            if field is None:
                return display_for_value(value, empty, getattr(attr, "boolean", False))
            return display_for_field(value, field, empty)

        shown: Any = column
        shown.short_description = label_for_field(name, self.model, model_admin)
        shown.__name__ = name if isinstance(name, str) else getattr(name, "__name__", "column")
        return shown


def _names_in_body(model: Any) -> set[str]:
    return {name for field in model.body_fields() for name in (field.name, field.attname)}


class DeletedFilter(admin.SimpleListFilter):
    """The filter "deleted" of the list. With "yes", the list shows only deleted objects. Without a
    choice, it shows only objects that are not deleted.
    """

    title = _lazy("deleted")
    parameter_name = "deleted"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return [("yes", _("Yes"))]

    def choices(self, changelist: Any) -> Iterator[Any]:
        # Overrides SimpleListFilter.choices(). Django calls the choice without a filter "All". Here
        # it is "No", because the list then shows only objects that are not deleted.
        shows_deleted = self.value() == "yes"
        yield {
            "selected": not shows_deleted,
            "query_string": changelist.get_query_string(remove=[self.parameter_name]),
            "display": _("No"),
        }
        yield {
            "selected": shows_deleted,
            "query_string": changelist.get_query_string({self.parameter_name: "yes"}),
            "display": _("Yes"),
        }

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        # Return the queryset unchanged. ObjectAdmin.get_queryset() has applied the filter, because
        # it returns only the deleted objects or only the others.
        return queryset


class ObjectAdmin(ShardedModelAdmin):
    """``ShardedModelAdmin`` for objects: ``list_display`` and ``fields`` may name fields of the
    body.

    Deleting sets ``active`` to False. The filter "deleted" lists deleted objects, and the action
    "restore" undeletes them. The action needs the permission to change objects, and makes an entry
    in the log of the admin. The list cannot be sorted, filtered, searched or edited by fields of
    the body.

    Objects whose bodies cannot be read are listed with their errors, and can be deleted. A visitor
    who opens such an object is sent back to the list.

    :raises InvalidObjectType: ``list_editable`` is set, ``form`` does not compare versions, or an
        option such as ``search_fields`` names a field of the body.
    """

    form = ObjectForm
    readonly_fields = ("ts",)
    actions = ("restore",)

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
        body = _names_in_body(self.model)
        for option, names in self._names_in_queries().items():
            if own := sorted(body.intersection(name.split("__")[0] for name in names)):
                raise InvalidObjectType(
                    f"{type(self).__name__}.{option} names {own!r}, but these fields of"
                    f" {self.model.__name__} are in the bodies of the objects, which a query does not"
                    " search. Name columns of the table."
                )

    def _names_in_queries(self) -> dict[str, list[str]]:
        """Return the names that the list would use in queries, such as ``title__icontains``, by option."""
        filters = [
            each[0] if isinstance(each, (list, tuple)) else each for each in self.list_filter or ()
        ]
        names: dict[str, list[Any]] = {
            "search_fields": list(self.search_fields or ()),
            "list_filter": filters,
            "ordering": list(self.ordering or ()),
            "date_hierarchy": [self.date_hierarchy],
        }
        return {
            option: [name.lstrip("-^=@") for name in each if isinstance(name, str)]
            for option, each in names.items()
        }

    def _lists_deleted(self, request: HttpRequest) -> bool:
        match = request.resolver_match
        return (
            request.GET.get(DeletedFilter.parameter_name) == "yes"
            and match is not None
            and (match.url_name or "").endswith("_changelist")
        )

    def get_queryset(self, request: HttpRequest) -> Any:
        if not self._lists_deleted(request):
            return super().get_queryset(request)
        rows = self.model._default_manager.with_deleted().filter(active=False)
        return self.in_scope(request, rows.order_by(*self.get_ordering(request)))

    def get_list_filter(self, request: HttpRequest) -> Any:
        return [*super().get_list_filter(request), DeletedFilter]

    def get_list_display_links(self, request: HttpRequest, list_display: Any) -> Any:
        # The pages of deleted objects do not exist.
        if self._lists_deleted(request):
            return None
        return super().get_list_display_links(request, list_display)

    def get_actions(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        actions: Any = super().get_actions(request, *args, **kwargs)
        restores = self._lists_deleted(request)
        return {name: each for name, each in actions.items() if (name == "restore") is restores}

    @admin.action(
        permissions=["change"], description=_lazy("Restore selected %(verbose_name_plural)s")
    )
    def restore(self, request: HttpRequest, queryset: Any) -> None:
        """Set ``active`` of deleted objects to True again."""
        for row in queryset:
            with row.edit():
                row.active = True
            self.log_change(request, row, _("Restored."))

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
        body = _names_in_body(self.model)
        return [name for name in super().get_sortable_by(request) if name not in body]

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> Any:
        return ObjectChangeList

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
        except DamagedObject as exc:
            self.message_user(request, str(exc), messages.ERROR)
            name = f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist"
            return HttpResponseRedirect(reverse(name, current_app=self.admin_site.name))
