"""The page on which a user adds a row. If its form offers related rows, the page has to know the
shard of the new row before it can build the form.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.admin.options import IS_POPUP_VAR
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.utils.html import format_html
from django.utils.translation import gettext

from sharded_orm.admin.base import ShardedBase
from sharded_orm.admin.error_pages import message_page
from sharded_orm.admin.exceptions import InvalidFocus
from sharded_orm.admin.forms import draw_shard, is_open
from sharded_orm.admin.object_links import change_url
from sharded_orm.admin.relation_widgets import PickersMixin, RawId, can_be_related
from sharded_orm.admin.shard_scope import (
    KEY_VAR,
    SHARD_VAR,
    ShardScope,
    locate,
    new_row_scope,
    read_key,
    set_scope,
)
from sharded_orm.models.sharding.options import shard_options


class AddViewMixin(PickersMixin, ShardedBase):
    """Mixin of :class:`ShardedModelAdmin` that finds the shard for the form of a new row."""

    def prepare_add(self, request: HttpRequest) -> Any:
        """Set the scope of the request (:class:`ShardScope`) for the form of a new row.

        If the form has relations inside the shard group, the shard must be known before the form is
        built, because the widgets offer rows of that shard. Otherwise, the user types the shard key
        into an ordinary field.

        :return: None if the form can be built; else a response to send instead, such as a page that
            asks for the shard key.
        """
        if not self.has_add_permission(request):
            raise PermissionDenied
        options = self.shard_options
        try:
            scope = self._new_row_scope(request)
        except InvalidFocus as exc:
            if options.key_is_generated:
                # The shard key of a new row is generated, so the user cannot help by typing in a
                # key. Show only the error.
                return message_page(self, request, self.error_text(request, exc))
            return self._ask_for_key(request, self.error_text(request, exc))
        if options.key_is_generated:
            return self._choose_shard(request, scope)
        # If the shard key is read-only, the form of the row has no input for it. So ask for the key
        # on a page before the form.
        readonly = options.key is not None and options.key.name in self.get_readonly_fields(request)
        if scope.key is None and (readonly or self.relates_inside_group(request)):
            return self._ask_for_key(request)
        if scope.key is not None and request.method == "GET":
            form = self._key_form(request, {KEY_VAR: str(scope.key)})
            if not form.is_valid():
                return self._ask_for_key(request, form=form)
        set_scope(request, scope)
        return None

    def _new_row_scope(self, request: HttpRequest) -> ShardScope:
        options = self.shard_options
        scope = new_row_scope(request, options)
        name = options.key.name if options.key is not None else ""
        if scope.key is None and not options.key_is_generated and request.GET.get(name):
            # Take the shard key from a URL parameter such as ?owner=414, with which Django sets
            # initial values of the form.
            key = read_key(options, request.GET[name])
            return ShardScope(options, key=key, home=locate(options, key))
        return scope

    def _choose_shard(self, request: HttpRequest, scope: ShardScope) -> Any:
        """Choose an open shard for a new row whose key is generated, and set the scope.

        - If the URL names an open shard, the scope is that shard.
        - Otherwise, if the form of a GET request needs a shard, redirect to this page with a random
          open shard in the URL.
        - Otherwise, if the user may not see every shard, the scope is a random open shard.
        - Otherwise, the scope is the whole shard group.

        :return: the redirect; None if the scope is set.
        :raises PermissionDenied: a random shard is needed, but no shard is open, or the user may
            not see any of the random shards that were tried.
        """
        options, home = self.shard_options, scope.home
        if home is not None and not is_open(options, home.number):
            if request.method == "GET":
                text = f"{home.alias} takes no new rows; this one is to be on another shard."
                self.message_user(request, text, messages.WARNING)
            home = None
        needs_shard = request.method == "GET" and self.relates_inside_group(request)
        if home is None and (needs_shard or not self.may_look_everywhere(request)):
            home = draw_shard(options, partial(self.has_shard_permission, request))
            if home is None:
                raise PermissionDenied
            if needs_shard:
                query = request.GET.copy()
                query.pop(KEY_VAR, None)
                query[SHARD_VAR] = home.alias
                return HttpResponseRedirect(f"{request.path}?{query.urlencode()}")
        set_scope(request, ShardScope(options, shard=home, home=home))
        return None

    def alias_of_page(self, request: HttpRequest, *, known: bool) -> str:
        """Return the alias on which the page opens its transaction.

        This is the alias of the row's shard. If the shard of a new row is not known yet, it is the
        alias of the whole shard group.

        :param known: True if the page shows a stored row, whose shard is always known; False on the
            page for a new row.
        """
        scope = self.focus(request)
        shard_known = known or scope.key is not None or self.shard_options.key_is_generated
        if scope.alias is not None and shard_known:
            return scope.alias
        return self.shard_options.group

    def relates_inside_group(self, request: HttpRequest) -> bool:
        """Whether the form of a new row shows other rows of the same shard group.

        True if an editable field of the model is a relation to a model of the group, or if the page
        has an inline of such a model. Such a form can be built only when the shard of the new row
        is known, because it offers the rows of this shard.
        """
        group = self.shard_options.group
        fields: list[Any] = [*self.opts.fields, *self.opts.many_to_many]
        relations = [
            field.related_model
            for field in fields
            if field.is_relation and field.editable and not field.remote_field.parent_link
        ]
        relations += [inline.model for inline in self.get_inlines(request, None)]
        related = [shard_options(model) for model in relations if isinstance(model, type)]
        return any(options is not None and options.group == group for options in related)

    def get_changeform_initial_data(self, request: HttpRequest) -> Any:
        # Drop values of URL parameters if no related row can have them. The widgets would query for
        # these values, and the database may raise an error for such a query.
        initial: dict[str, Any] = super().get_changeform_initial_data(request)
        for field in (*self.opts.fields, *self.opts.many_to_many):
            value = initial.get(field.name)
            if value is None or self._options_in_group(field) is None:
                continue
            if isinstance(value, list):
                initial[field.name] = [pk for pk in value if can_be_related(field, pk)]
            elif not can_be_related(field, value):
                del initial[field.name]
        return initial

    # -- Ask for the key -------------------------------------------------------

    def key_formfield(self, request: HttpRequest) -> Any:
        """Return the form field that asks for the shard key.

        Usually this is the key's field in the model's form. If the key is a foreign key to a
        sharded model, this is a field for the value that the foreign key stores.
        """
        key: Any = self.shard_options.key
        related = None if key.remote_field is None else shard_options(key.related_model)
        if related is None:
            return self.formfield_for_dbfield(key, request)
        # The shard key is a foreign key to a row that may be on any shard, and no widget can offer
        # all these rows. So ask for the id of the row, with a link to the list of all shards.
        target = key.target_field
        field = target.formfield() or forms.CharField()
        field.widget = RawId(key.remote_field, self.admin_site)
        field.label = key.verbose_name.capitalize()
        return field

    def _key_form(self, request: HttpRequest, data: Any = None) -> forms.Form:
        form_class: type[forms.Form] = type(
            "KeyForm", (forms.Form,), {KEY_VAR: self.key_formfield(request)}
        )
        return form_class(data)

    def _ask_for_key(
        self, request: HttpRequest, problem: str = "", form: forms.Form | None = None
    ) -> TemplateResponse:
        form = self._key_form(request) if form is None else form
        opts, key = self.opts, self.shard_options.key
        context = {
            **self.admin_site.each_context(request),
            "title": gettext("Add %s") % opts.verbose_name,
            "subtitle": None,
            "opts": opts,
            "form": form,
            "field": form[KEY_VAR],
            "key": key.verbose_name if key is not None else "",
            "problem": problem,
            # The user types the shard key into this form, and then gets to the form of the new row.
            # Pass the other parameters of the URL on to that form, in hidden inputs.
            "hidden_inputs": [
                (name, value)
                for name, values in request.GET.lists()
                for value in values
                if name != KEY_VAR
            ],
            "is_popup": IS_POPUP_VAR in request.GET,
            "media": self.media + form.media,
            "has_view_permission": self.has_view_permission(request),
            "preserved_filters": self.get_preserved_filters(request),
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/sharded_orm/add_key.html", context)

    def message_added(self, request: HttpRequest, obj: Any) -> None:
        """Show the message that ``obj`` was added, as Django's ``response_add()`` does.

        The message links to the change page by the object id (see :mod:`identity`).
        """
        url = change_url(obj, self.admin_site.name)
        link = (
            format_html('<a href="{}">{}</a>', url, obj)
            if url and self.has_change_permission(request, obj)
            else str(obj)
        )
        text = format_html(
            gettext("The {name} “{obj}” was added successfully."),
            name=self.opts.verbose_name,
            obj=link,
        )
        self.message_user(request, text, messages.SUCCESS)
