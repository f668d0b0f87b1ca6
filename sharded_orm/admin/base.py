"""What every part of a :class:`ShardedModelAdmin` and of its inlines builds on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from django.contrib import admin
from django.contrib.admin.options import csrf_protect_m
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import DatabaseError
from django.http import Http404, HttpRequest

from sharded_orm import runtime
from sharded_orm.admin.display import bare
from sharded_orm.admin.failures import silence
from sharded_orm.admin.identity import is_misplaced
from sharded_orm.admin.shard_scope import ShardScope, focus_of
from sharded_orm.exceptions import InvalidFocus, NoOpenShard
from sharded_orm.models.after_migrate.permissions import may_access
from sharded_orm.models.sharding.options import ShardOptions, shard_options
from sharded_orm.scatter.failures import is_failure
from sharded_orm.topology.model import Shard

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = admin.ModelAdmin

View = TypeVar("View", bound=Callable[..., Any])
#: Django's decorator of the views of a model admin, which the stubs have without a type.
csrf_protected: Callable[[View], View] = csrf_protect_m


def options_of(model: type[Any]) -> ShardOptions:
    """The options of a sharded model; raises ``ImproperlyConfigured`` for any other."""
    options = shard_options(model)
    if options is None:
        raise ImproperlyConfigured(
            f"{model._meta.label} is not a sharded model: register it with Django's ModelAdmin."
        )
    return options


class ShardedBase(_ModelAdmin):
    """The place that a request looks at, the rows there, and who may.

    Parts of ``ShardedModelAdmin`` derive from it, so that each can be read and typed alone.
    """

    def __init__(self, model: type[Any], admin_site: Any) -> None:
        self.shard_options: ShardOptions = options_of(model)
        super().__init__(model, admin_site)

    def focus(self, request: HttpRequest) -> ShardScope:
        """Where the request looks.

        :raises InvalidFocus: there is no such place.
        :raises PermissionDenied: the user may not look there.
        """
        found = focus_of(request, self.shard_options)
        if found.home is not None and not self.has_shard_permission(request, found.home):
            raise PermissionDenied
        return found

    def reason(self, request: HttpRequest, error: Exception) -> str:
        """What the user may read of ``error``: where a key is, only who may look there.

        Every message of a refusal goes through here: those of routing name shards.
        """
        if isinstance(error, InvalidFocus):
            home = error.home and runtime.topology().resolve(error.home)
            if home and self.has_shard_permission(request, home):
                return f"{error} They are on {home.alias}."
            return str(error)
        if isinstance(error, NoOpenShard) or self.may_look_everywhere(request):
            return str(error)
        return "a row is on another shard than its key leads to, or relates to one that is."

    def get_queryset(self, request: HttpRequest) -> Any:
        rows = super().get_queryset(request)
        try:
            focus = self.focus(request)
        except InvalidFocus as exc:
            # The changelist asks for the focus first, and has more to say.
            raise Http404(str(exc)) from exc
        if focus.everywhere and not self.may_look_everywhere(request):
            return rows.none()
        return focus.of(rows)

    def get_paginator(self, request: HttpRequest, queryset: Any, *args: Any, **kwargs: Any) -> Any:
        # For the autocomplete view; the changelist turns its own pages, and the log is global.
        if getattr(queryset, "model", None) is self.model and not queryset.ordered:
            queryset = queryset.order_by("pk")
        made = super().get_paginator(request, queryset, *args, **kwargs)
        match = request.resolver_match
        if match is not None and match.url_name == "autocomplete":
            self._answer_or_404(request, made)
        return made

    def _answer_or_404(self, request: HttpRequest, pages: Any) -> None:
        """Of Django's view, in which an outage could not be told in another way."""
        home = self.focus(request).home
        if home is None:
            return  # Shards that do not answer are left out.
        try:
            # The view's first question, asked here, where its failure can be answered. The
            # paginator remembers the number.
            _ = pages.count
        except DatabaseError as exc:
            if not is_failure(exc):
                raise
            raise Http404(silence(home, exc)) from exc

    # -- Who may ---------------------------------------------------------------

    def has_shard_permission(self, request: HttpRequest, shard: Shard) -> bool:
        """A hook: whether the user may look at ``shard`` and change what is there.

        Asked beside the permissions of Django and of the group. Where it refuses any shard,
        nothing is asked over all shards.
        """
        return True

    def may_look_everywhere(self, request: HttpRequest) -> bool:
        """Whether the user may look at every shard of the group."""
        hook = type(self).has_shard_permission
        if hook is ShardedBase.has_shard_permission:
            return True
        shards = runtime.group(self.shard_options.group).shards()
        return all(self.has_shard_permission(request, shard) for shard in shards)

    def _may(self, request: HttpRequest, row: Any, *, write: bool) -> bool:
        if not may_access(request.user, self.shard_options.group):
            return False
        if row is None:
            return True
        row = bare(row)
        if row._state.db is None:
            return True
        shard = runtime.topology().resolve(row._state.db)
        if shard is not None and not self.has_shard_permission(request, shard):
            return False
        # save() would refuse it, and so would a delete.
        return not (write and is_misplaced(row))

    def has_add_permission(self, request: HttpRequest) -> bool:
        return super().has_add_permission(request) and self._may(request, None, write=True)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_view_permission(request, obj) and self._may(request, obj, write=False)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_change_permission(request, obj) and self._may(request, obj, write=True)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_delete_permission(request, obj) and self._may(request, obj, write=True)
