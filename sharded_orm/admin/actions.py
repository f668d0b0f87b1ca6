"""Admin actions on rows of several shards: one call and one transaction per shard, then one report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.contrib.admin import helpers
from django.contrib.admin.utils import unquote
from django.http import HttpRequest, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.utils.translation import gettext as _

from sharded_orm import compat, runtime
from sharded_orm.admin.action_selection import ActionSelection, select, select_all
from sharded_orm.admin.base import ShardedBase
from sharded_orm.admin.failures import join_names
from sharded_orm.admin.global_lookups import lookup_notes
from sharded_orm.admin.identity import is_misplaced
from sharded_orm.admin.object_links import NamedRow
from sharded_orm.admin.run_by_shard import report, run_by_shard
from sharded_orm.routers import standing_on


def action_arguments(location: Any) -> dict[str, Any]:
    """Return the keyword arguments with which ``get_actions()`` returns the actions for
    ``location``.

    :param location: the page that offers the actions: an ``ActionLocation`` of Django 6.1, either
        the changelist or the page of one row. None in older versions of Django, whose
        ``get_actions()`` has no such argument. The result is then an empty dict.
    """
    return {} if location is None else {"action_location": location}


def action_prefix(location: Any) -> str:
    """Return the prefix of the names of inputs in the form that starts actions at ``location``.

    ``ModelAdmin.response_action()`` uses the same prefix. It is empty for the form of the
    changelist.
    """
    return "" if location is None or location.value == "CHANGE_LIST" else str(location.value)


class ActionsMixin(ShardedBase):
    """Mixin of :class:`ShardedModelAdmin` that runs actions on rows of several shards.

    An action is called once for each shard that has selected rows. Each call gets the rows of one
    shard, and runs in a transaction of that shard. If a call fails, the action is still called for
    the other shards. Messages tell the user what was done on which shards. The entries of the
    admin's log are committed after the shard's transaction.

    An action with the attribute ``across_shards = True`` is called only once, with the rows of all
    shards, and without a transaction.
    """

    def action_checkbox(self, obj: Any) -> Any:
        # A misplaced row, whose shard key leads to a different shard, gets no checkbox, because no
        # action may write it. select() refuses such a row if its object id is posted all the same.
        return "" if is_misplaced(obj) else super().action_checkbox(NamedRow(obj))

    def response_action(
        self, request: HttpRequest, queryset: Any, action_location: Any = None
    ) -> Any:
        # Overrides ModelAdmin.response_action(). Django would look up the selected rows by their
        # primary keys alone, which may not determine the shard. Since Django 6.1, this method also
        # runs actions of the page of one row.
        action = self._chosen_action(request, action_location)
        if action is None:
            self.message_user(request, _("No action selected."), messages.WARNING)
            return None
        func, description, select_across = action
        object_ids = request.POST.getlist(helpers.ACTION_CHECKBOX_NAME)
        if action_prefix(action_location):
            # The form on the page of one row posts only the primary key, which may not determine
            # the shard. So take the object id from the URL of the page.
            assert request.resolver_match is not None
            object_ids, select_across = [unquote(request.resolver_match.kwargs["object_id"])], False
        if not object_ids and not select_across:
            message = _(
                "Items must be selected in order to perform "
                "actions on them. No items have been changed."
            )
            self.message_user(request, message, messages.WARNING)
            return None
        if select_across and (notes := lookup_notes(request)):
            # The filters or the search look up rows in the global database. One of these lookups
            # has found too many rows, and used only some of them. (The sentences in ``notes`` say
            # so.) An action on "all rows" would therefore miss some matching rows. So do nothing.
            self.message_user(
                request, f"{' '.join(notes)} No items have been changed.", messages.ERROR
            )
            return HttpResponseRedirect(request.get_full_path())
        selection = self._selection(request, queryset, None if select_across else object_ids)
        if selection.unknown:
            self.message_user(
                request,
                f"{selection.unknown} of {len(object_ids)} selected rows are not here, or not any more."
                " No items have been changed.",
                messages.WARNING,
            )
            return None
        self._report_misplaced(request, selection)
        if getattr(func, "takes_selection", False):
            response = func(self, request, selection)
        elif getattr(func, "across_shards", False):
            response = self._run_once(request, func, selection)
        else:
            response = run_by_shard(
                self, request, selection, description, lambda part: func(self, request, part.rows)
            )
        if isinstance(response, HttpResponseBase):
            return response
        return HttpResponseRedirect(request.get_full_path())

    def _report_misplaced(self, request: HttpRequest, selection: ActionSelection) -> None:
        count = sum(selection.misplaced.values())
        if not count:
            return
        on_shards = join_names(
            f"{alias} ({number})" for alias, number in selection.misplaced.items()
        )
        rows, keys = ("row", "its key leads") if count == 1 else ("rows", "their keys lead")
        verb, shards = ("is", "another shard") if count == 1 else ("are", "other shards")
        self.message_user(
            request,
            f"{count} misplaced {rows} on {on_shards} {verb} left alone: {keys} to {shards}.",
            messages.WARNING,
        )

    def _chosen_action(
        self, request: HttpRequest, action_location: Any
    ) -> tuple[Any, str, bool] | None:
        """Return ``(action, description of the action, whether all rows of the list are selected)``.

        Return None if no valid action was chosen.
        """
        try:
            index = int(request.POST.get("index", 0))
        except ValueError:
            index = 0
        data = request.POST.copy()
        for name in (helpers.ACTION_CHECKBOX_NAME, "index"):
            data.pop(name, None)
        names = data.getlist("action")
        if -len(names) <= index < len(names):
            data["action"] = names[index]
        where = action_arguments(action_location)
        form: Any = self.action_form(data, auto_id=None, prefix=action_prefix(action_location))
        form.fields["action"].choices = self.get_action_choices(request, **where)
        if not form.is_valid():
            return None
        actions: Any = self.get_actions(request, **where)
        func, _name, description = compat.action_parts(actions[form.cleaned_data["action"]])
        opts = self.opts
        words = {
            "verbose_name": opts.verbose_name,
            "verbose_name_plural": opts.verbose_name_plural,
        }
        return func, str(description) % words, form.cleaned_data["select_across"]

    def _selection(
        self, request: HttpRequest, queryset: Any, object_ids: list[str] | None
    ) -> ActionSelection:
        scope = self.focus(request)
        if scope.everywhere:
            # Do not pass partial=True to scatter(). With partial=True, the query would succeed
            # although some shards do not answer, and the action would miss the rows of these shards
            # without an error.
            queryset = queryset.scatter()
        if object_ids is not None:
            return select(self.shard_options, queryset, object_ids, scope.home)
        if queryset.query.is_empty():
            shards = []
        elif scope.home is not None:
            shards = [scope.home]
        else:
            route = queryset.explain_routing()
            shards = [runtime.shard(route.group, number) for number in route.shards]
        return select_all(self.shard_options, queryset, shards)

    def _run_once(
        self, request: HttpRequest, func: Callable[..., Any], selection: ActionSelection
    ) -> Any:
        if selection.outages.errors:
            report(self, request, "", [], selection.outages)
            self.message_user(
                request,
                "This action needs all of the rows at once. No items have been changed.",
                messages.ERROR,
            )
            return None
        home = selection.parts[0].alias if len(selection.parts) == 1 else None
        with standing_on(home):
            return func(self, request, selection.queryset)
