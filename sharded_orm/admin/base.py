"""The base of all parts of :class:`ShardedModelAdmin`: scope, rows and permissions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from django.contrib import admin
from django.contrib.admin.options import csrf_protect_m
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import DatabaseError
from django.http import Http404, HttpRequest

from sharded_orm import runtime
from sharded_orm.admin.display import unwrap
from sharded_orm.admin.failures import outage_text
from sharded_orm.admin.identity import is_misplaced
from sharded_orm.admin.shard_scope import ShardScope, scope_of
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
#: Django's decorator for views of a model admin. The stubs have no type for it.
csrf_protected: Callable[[View], View] = csrf_protect_m


def options_of(model: type[Any]) -> ShardOptions:
    """The options of a sharded model.

    :raises ImproperlyConfigured: the model is not sharded.
    """
    options = shard_options(model)
    if options is None:
        raise ImproperlyConfigured(
            f"{model._meta.label} is not a sharded model: register it with Django's ModelAdmin."
        )
    return options


class ShardedBase(_ModelAdmin):
    """The scope of a request (:class:`ShardScope`), its rows, and the user's permissions.

    The mixins of ``ShardedModelAdmin`` derive from this class, so each can be read and typed alone.
    """

    def __init__(self, model: type[Any], admin_site: Any) -> None:
        self.shard_options: ShardOptions = options_of(model)
        super().__init__(model, admin_site)

    def focus(self, request: HttpRequest) -> ShardScope:
        """The scope of the request: a shard, a key, or the whole group.

        :raises InvalidFocus: there is no such shard or key.
        :raises PermissionDenied: the user may not look at the shard.
        """
        scope = scope_of(request, self.shard_options)
        if scope.home is not None and not self.has_shard_permission(request, scope.home):
            raise PermissionDenied
        return scope

    def error_text(self, request: HttpRequest, error: Exception) -> str:
        """The text of ``error`` for the user: it names no shard at which the user may not look.

        Every message of a refusal goes through here, because errors of routing name shards.
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
            scope = self.focus(request)
        except InvalidFocus as exc:
            # Not for the changelist: it reads the scope first, and shows a page of its own.
            raise Http404(str(exc)) from exc
        if scope.everywhere and not self.may_look_everywhere(request):
            return rows.none()
        return scope.restrict(rows)

    def get_paginator(self, request: HttpRequest, queryset: Any, *args: Any, **kwargs: Any) -> Any:
        # For the autocomplete view. The changelist has pages of its own, and the log is global.
        if getattr(queryset, "model", None) is self.model and not queryset.ordered:
            queryset = queryset.order_by("pk")
        paginator = super().get_paginator(request, queryset, *args, **kwargs)
        match = request.resolver_match
        if match is not None and match.url_name == "autocomplete":
            self._count_or_404(request, paginator)
        return paginator

    def _count_or_404(self, request: HttpRequest, paginator: Any) -> None:
        """Raise ``Http404`` if the shard does not answer: the autocomplete view has no other way."""
        home = self.focus(request).home
        if home is None:
            return  # Over all shards, those that do not answer are left out.
        try:
            # The view's first query, run here, where its failure can be answered. The paginator
            # caches the count.
            _ = paginator.count
        except DatabaseError as exc:
            if not is_failure(exc):
                raise
            raise Http404(outage_text(home, exc)) from exc

    # -- Permissions -----------------------------------------------------------

    def has_shard_permission(self, request: HttpRequest, shard: Shard) -> bool:
        """A hook: whether the user may look at ``shard`` and change its rows.

        Called in addition to the permissions of Django and of the group. If it refuses any shard,
        the user gets no list over all shards.
        """
        return True

    def may_look_everywhere(self, request: HttpRequest) -> bool:
        """Whether the user may look at every shard of the group."""
        hook = type(self).has_shard_permission
        if hook is ShardedBase.has_shard_permission:
            return True
        shards = runtime.group(self.shard_options.group).shards()
        return all(self.has_shard_permission(request, shard) for shard in shards)

    def _may_access(self, request: HttpRequest, row: Any, *, write: bool) -> bool:
        if not may_access(request.user, self.shard_options.group):
            return False
        if row is None:
            return True
        row = unwrap(row)
        if row._state.db is None:
            return True
        shard = runtime.topology().resolve(row._state.db)
        if shard is not None and not self.has_shard_permission(request, shard):
            return False
        # save() and delete() refuse a misplaced row.
        return not (write and is_misplaced(row))

    def has_add_permission(self, request: HttpRequest) -> bool:
        return super().has_add_permission(request) and self._may_access(request, None, write=True)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_view_permission(request, obj) and self._may_access(
            request, obj, write=False
        )

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_change_permission(request, obj) and self._may_access(
            request, obj, write=True
        )

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_delete_permission(request, obj) and self._may_access(
            request, obj, write=True
        )
