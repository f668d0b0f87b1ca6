"""The admin pages of one row: change, add, history, and view on site."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.contrib.admin.exceptions import DisallowedModelAdminToField
from django.contrib.admin.models import LogEntry
from django.contrib.admin.options import IS_POPUP_VAR, TO_FIELD_VAR
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import DatabaseError, router, transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import path, reverse
from django.utils.http import urlencode

from sharded_orm.admin import object_links
from sharded_orm.admin.add_view import AddViewMixin
from sharded_orm.admin.base import csrf_protected
from sharded_orm.admin.error_pages import no_reachable_shard_page, shard_down_page
from sharded_orm.admin.exceptions import InvalidFocus, InvalidObjectID
from sharded_orm.admin.forms import with_fixed_key
from sharded_orm.admin.identity import SEPARATOR, identify, is_misplaced, parse
from sharded_orm.admin.object_links import change_url, named_row
from sharded_orm.admin.shard_scope import (
    KEY_VAR,
    SHARD_VAR,
    ShardScope,
    locate,
    refuse_key,
    set_scope,
)
from sharded_orm.exceptions import (
    CrossShardRelation,
    DanglingShardKey,
    NoOpenShard,
    NoReachableShard,
    ShardKeyChanged,
)
from sharded_orm.models.sharding.key_validation import KEY_STAYS
from sharded_orm.routers import standing_on
from sharded_orm.scatter.failures import is_failure
from sharded_orm.topology.model import Shard

_SAVE_AS_NEW = "_saveasnew"


class ObjectViewsMixin(AddViewMixin):
    """Mixin of :class:`ShardedModelAdmin` with the views that show and save one row."""

    # -- Find the row ----------------------------------------------------------

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Any:
        """Return the row that the object id in a URL names; None if there is no such row.

        Object ids are described in :mod:`sharded_orm.admin.identity`. If the row's shard can be
        found, the scope of the request (:class:`ShardScope`) becomes that shard.
        """
        options = self.shard_options
        try:
            home, only_this_row = self._find(request, object_id, from_field)
        except InvalidFocus as exc:
            raise Http404(str(exc)) from exc
        except (InvalidObjectID, ValidationError, ValueError):
            return None
        set_scope(request, ShardScope(options, shard=home, home=home))
        try:
            row = only_this_row(self.get_queryset(request)).get()
        except (self.model.DoesNotExist, self.model.MultipleObjectsReturned):
            return None
        identify([row])
        # Make the row's shard key a part of the scope, in addition to its shard. Then rows that the
        # user adds by links on this page get the same key.
        key = None if is_misplaced(row) else options.key_of(row)
        set_scope(request, ShardScope(options, shard=home, key=key, home=home))
        return row

    def _find(
        self, request: HttpRequest, object_id: str, from_field: str | None
    ) -> tuple[Shard, Callable[[Any], Any]]:
        """Return the shard of a row, and a function that narrows a queryset to the row.

        Usually costs at most one query of the directory, the table that records the shard of each
        key. The shard itself is not queried.

        :param object_id: an object id (the text that names a row in URLs of the admin), or the row's
            value of the field ``from_field``.
        :param from_field: the name of a field. If it is None or the name of the primary key, only an
            object id is accepted.
        """
        options, within = self.shard_options, self.focus(request).shard
        by_object_id = from_field in (None, self.opts.pk.name)
        if by_object_id or SEPARATOR in object_id:
            try:
                identity = parse(options, object_id, within)
                return identity.shard, identity.among
            except (InvalidFocus, InvalidObjectID):
                if by_object_id:
                    raise
        # The link to this page is in a related-field widget. Such a link names the row by its value
        # of the field to which the foreign key refers. The URL parameter _to_field names this
        # field.
        field: Any = self.opts.get_field(str(from_field))
        value = field.to_python(object_id)
        if field == options.key:
            refuse_key(options, field.get_prep_value(value))
        home = locate(options, value) if options.names_shard(field) else within
        if home is None:
            raise InvalidObjectID(f"{object_id!r} does not tell on which shard the row is.")
        return home, lambda rows: rows.filter(**{field.name: value})

    def _get_obj_does_not_exist_redirect(
        self, request: HttpRequest, opts: Any, object_id: str
    ) -> Any:
        # Overrides ModelAdmin._get_obj_does_not_exist_redirect(), which redirects to the index if
        # the row does not exist. Respond with a 404 instead.
        if not (self.has_view_or_change_permission(request) or self.has_delete_permission(request)):
            # Users without permission get no 404, because it would reveal which keys exist.
            raise PermissionDenied
        text = unquote(object_id)
        try:
            parse(self.shard_options, text, self.focus(request).shard)
        except (InvalidFocus, InvalidObjectID) as exc:
            raise Http404(f"{text!r} names no {opts.verbose_name}. {exc}") from exc
        raise Http404(
            f"There is no {opts.verbose_name} {text!r}. It may have been deleted, or is on another"
            " shard by now."
        )

    # -- Add and change --------------------------------------------------------

    @csrf_protected
    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: Any = None,
    ) -> Any:
        """Run Django's view, which adds or changes a row, on the row's shard.

        An error rolls back what a POST has written, both on the shard and in the admin's log. The
        transaction of the shard is nested in the transaction of the log, so the shard commits
        first. If the process dies between the two commits, the row is saved without a log entry.
        """
        try:
            if object_id is None:
                response = self.prepare_add(request)
                if response is not None:
                    return response
            elif request.method == "POST" and _SAVE_AS_NEW in request.POST:
                self._prepare_copy(request, object_id)
            else:
                self._scope_to_row(request, object_id)
            alias = self.alias_of_page(request, known=object_id is not None)
            form_url = form_url or _action(request)
            if request.method != "POST":
                with standing_on(alias):
                    return super().changeform_view(request, object_id, form_url, extra_context)
            with transaction.atomic(using=router.db_for_write(LogEntry)), standing_on(alias):
                return super().changeform_view(request, object_id, form_url, extra_context)
        except (ShardKeyChanged, CrossShardRelation, DanglingShardKey, NoOpenShard) as exc:
            if request.method != "POST":
                raise
            # The row cannot be saved. After the form was checked, this row or a row to which it
            # refers has moved to another shard or was deleted. Another possible cause is that the
            # last open shard was closed.
            self.message_user(
                request, f"Nothing was saved: {self.error_text(request, exc)}", messages.ERROR
            )
            return HttpResponseRedirect(request.get_full_path())
        except DatabaseError as exc:
            return self._shard_down(request, exc)

    def _scope_to_row(self, request: HttpRequest, object_id: str) -> None:
        """Set the scope of the request to the shard of the row with the id ``object_id``.

        Call this before Django's view opens its transaction, because the transaction must be on
        that shard.
        """
        to_field = request.POST.get(TO_FIELD_VAR, request.GET.get(TO_FIELD_VAR))
        if to_field and not self.to_field_allowed(request, to_field):
            raise DisallowedModelAdminToField(f"The field {to_field} cannot be referenced.")
        try:
            home, _ = self._find(request, unquote(object_id), to_field)
        except (InvalidFocus, InvalidObjectID, ValidationError, ValueError):
            self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        else:
            set_scope(request, ShardScope(self.shard_options, shard=home, home=home))

    def _prepare_copy(self, request: HttpRequest, object_id: str) -> None:
        """Set the scope of the request for "save as new", which saves a copy of the row.

        The copy gets the shard key of the original, so it is on the same shard. If shard keys are
        generated, the copy gets a new key that leads to the same shard.
        """
        row = self.get_object(request, unquote(object_id))
        if row is None:
            self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        if not self.has_view_or_change_permission(request, row) or is_misplaced(row):
            raise PermissionDenied

    def get_form(
        self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any
    ) -> Any:
        options, scope = self.shard_options, self.focus(request)
        readonly = self.get_readonly_fields(request, obj)
        new_row: dict[str, Any] = {}
        if obj is None and options.key_is_generated:
            new_row["new_shard"] = scope.home.number if scope.home is not None else None
        elif obj is None:
            new_row["new_key"] = scope.key
        # A project's get_form() may pass a form class, as Django's documentation recommends. Wrap
        # this class, so that its forms cannot change the shard key of a stored row either.
        form = kwargs.get("form", self.form)
        kwargs["form"] = with_fixed_key(form, options, hidden=readonly, **new_row)
        if options.key is not None and options.key.name in readonly:
            help_texts = getattr(getattr(form, "Meta", None), "help_texts", None) or {}
            kwargs["help_texts"] = {
                options.key.name: KEY_STAYS,
                **help_texts,
                **kwargs.get("help_texts", {}),
            }
        return super().get_form(request, obj, change, **kwargs)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        fields = super().get_readonly_fields(request, obj)
        options = self.shard_options
        if options.key is None or options.key_is_generated or options.key.name in fields:
            return fields
        if obj is None and self.focus(request).key is None:
            return fields
        return [*fields, options.key.name]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        fields = super().get_fields(request, obj)
        key = self.shard_options.key
        if self.fields or key is None or key.name not in fields:
            return fields
        # Show the shard key first. Otherwise it would be at the end, with the other read-only
        # fields.
        return [key.name, *(field for field in fields if field != key.name)]

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        # Check the permission for the shard of a new row only here. If the shard key was typed in
        # or generated, the shard was not known before the form was saved.
        if not change and not self._may_access(request, form.instance, write=True):
            raise PermissionDenied
        super().save_related(request, form, formsets, change)

    def get_inline_formsets(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        formsets = super().get_inline_formsets(request, *args, **kwargs)
        return [object_links.InlineFormSet.like(formset) for formset in formsets]

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any
    ) -> Any:
        obj = context["original"]
        context["adminform"] = object_links.Form.like(context["adminform"])
        context["original"] = named_row(obj)
        scope = self.focus(request)
        # For a new row, show the shard only if it is certain. It is certain if the shard key is
        # already chosen, or if the key will be generated for this shard. Otherwise the user may
        # type in a key that leads to another shard.
        shard_known = (
            obj is not None or scope.key is not None or self.shard_options.key_is_generated
        )
        context["shard"] = scope.home if shard_known else None
        context["unplaced"] = scope.key is not None and scope.home is None
        context["misplaced"] = obj is not None and is_misplaced(obj)
        response: Any = super().render_change_form(request, context, *args, **kwargs)
        names = response.template_name
        if isinstance(names, list | tuple) and names[-1] == "admin/change_form.html":
            response.template_name = [*names[:-1], "admin/sharded_orm/change_form.html"]
        return response

    def response_add(self, request: HttpRequest, obj: Any, post_url_continue: Any = None) -> Any:
        handled_by_django = {IS_POPUP_VAR, "_continue", "_addanother"}
        if self.save_as_continue:
            handled_by_django.add(_SAVE_AS_NEW)
        if request.POST.keys() & handled_by_django:
            return super().response_add(request, named_row(obj), post_url_continue)
        # After a plain "Save", do what Django's response_add() does, but link to the row by its
        # object id. Also call the hook response_post_save_add(), because projects override it.
        self.message_added(request, obj)
        return self.response_post_save_add(request, obj)

    # -- History ---------------------------------------------------------------

    def history_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> Any:
        try:
            response = super().history_view(request, object_id, extra_context)
        except DatabaseError as exc:
            return self._shard_down(request, exc)
        context = getattr(response, "context_data", None)
        if context is not None and "object" in context:
            row = context["object"] = named_row(context["object"])
            if row.pk != unquote(object_id):
                # The URL names the row by another text than its object id, as links of some widgets
                # do. The history page would be empty, because the admin's log has the row's entries
                # only under its object id. So redirect to the URL with the object id.
                opts, site = self.opts, self.admin_site.name
                name = f"admin:{opts.app_label}_{opts.model_name}_history"
                return HttpResponseRedirect(reverse(name, args=[quote(row.pk)], current_app=site))
        return response

    def log_addition(self, request: HttpRequest, obj: Any, message: Any) -> Any:
        return super().log_addition(request, named_row(obj), message)

    def log_change(self, request: HttpRequest, obj: Any, message: Any) -> Any:
        return super().log_change(request, named_row(obj), message)

    def log_deletions(self, request: HttpRequest, queryset: Any) -> Any:
        rows: Any = [named_row(obj) for obj in queryset]
        return super().log_deletions(request, rows)

    # -- View on site ----------------------------------------------------------

    def get_view_on_site_url(self, obj: Any = None) -> str | None:
        return object_links.site_url(self, obj)

    def get_urls(self) -> list[Any]:
        info = self.opts.app_label, self.opts.model_name
        view = self.admin_site.admin_view(self.site_view)
        own = path("<path:object_id>/site/", view, name="{}_{}_site".format(*info))
        # Put this URL pattern before Django's patterns, because the last one of these matches every
        # URL.
        return [own, *super().get_urls()]

    def site_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Redirect to the URL that the row's ``get_absolute_url()`` returns."""
        try:
            row = self.get_object(request, unquote(object_id))
        except DatabaseError as exc:
            return self._shard_down(request, exc)
        if row is None:
            self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        if not self.has_view_or_change_permission(request, row):
            raise PermissionDenied
        return HttpResponseRedirect(row.get_absolute_url())

    def _shard_down(self, request: HttpRequest, error: DatabaseError) -> HttpResponse:
        """Return the error page if ``error`` means that a shard does not answer; otherwise raise
        ``error``.

        The error page names the shard whose page was asked for. If a new row may be stored on any
        shard, ``error`` may also mean that none of the nodes with open shards can be reached.
        """
        if isinstance(error, NoReachableShard):
            return no_reachable_shard_page(self, request, error)
        scope = self.focus(request)
        if scope.home is None or not is_failure(error):
            raise error
        return shard_down_page(self, request, scope, error)

    def change_url(self, row: Any) -> str:
        """Return the URL of the change page of ``row`` in this admin site."""
        return str(change_url(row, self.admin_site.name))


def _action(request: HttpRequest) -> str:
    """Return the URL to which the page's form posts: a query string with the shard or key that the
    page's URL names.

    Without it, the POST would lose the shard or key. Return an empty string if the page's URL names
    none.
    """
    scope = {name: request.GET[name] for name in (SHARD_VAR, KEY_VAR) if request.GET.get(name)}
    return f"?{urlencode(scope)}" if scope else ""
