"""The base class of the mixins of :class:`ShardedModelAdmin`.

It finds out which rows a request is about (its scope: one shard, one shard key or the whole group),
and whether the user may see and change them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from django.contrib import admin
from django.contrib.admin.options import csrf_protect_m
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import DatabaseError
from django.http import Http404, HttpRequest

from sharded_orm import runtime
from sharded_orm.admin.exceptions import InvalidFocus
from sharded_orm.admin.failures import outage_text
from sharded_orm.admin.identity import is_misplaced
from sharded_orm.admin.object_links import unwrap
from sharded_orm.admin.shard_scope import ShardScope, scope_of
from sharded_orm.backends.write_hooks.followers import is_read_only
from sharded_orm.exceptions import DanglingShardKey, NoOpenShard
from sharded_orm.models.after_migrate.permissions import may_access
from sharded_orm.models.sharding.options import ShardOptions, shard_options
from sharded_orm.scatter.failures import is_failure
from sharded_orm.topology.model import Shard

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = admin.ModelAdmin

#: Name of an attribute of a request. The changelist sets the attribute if its page tells the user
#: which shards do not answer. Only then may the page leave out the rows of these shards.
NAMES_FAILURES = "_sharded_orm_names_failures"

View = TypeVar("View", bound=Callable[..., Any])
#: Django's decorator ``csrf_protect_m``, which adds CSRF protection to a view of a model admin. It
#: is assigned here to give it a type, which Django's stubs lack.
csrf_protected: Callable[[View], View] = csrf_protect_m


def options_of(model: type[Any]) -> ShardOptions:
    """Return the :class:`ShardOptions` of a model: its shard group and its shard key.

    :raises ImproperlyConfigured: the model is not sharded.
    """
    options = shard_options(model)
    if options is None:
        raise ImproperlyConfigured(
            f"{model._meta.label} is not a sharded model: register it with Django's ModelAdmin."
        )
    return options


class ShardedBase(_ModelAdmin):
    """Base class of the mixins of ``ShardedModelAdmin``.

    It offers what several mixins need: the scope of a request (:class:`ShardScope`), the rows of
    that scope, and the user's permissions. Each mixin derives from this class, so each mixin can be
    read and type-checked without the others.
    """

    def __init__(self, model: type[Any], admin_site: Any) -> None:
        self.shard_options: ShardOptions = options_of(model)
        super().__init__(model, admin_site)

    def focus(self, request: HttpRequest) -> ShardScope:
        """Return the scope of the request: one shard, one shard key, or the whole shard group.

        :raises InvalidFocus: the URL names a shard or a key that does not exist.
        :raises PermissionDenied: the user may not look at the shard of the scope.
        """
        scope = scope_of(request, self.shard_options)
        if scope.home is not None and not self.has_shard_permission(request, scope.home):
            raise PermissionDenied
        return scope

    def error_text(self, request: HttpRequest, error: Exception) -> str:
        """Return a text about ``error`` that does not name shards at which the user may not look.

        Use this method for every message about a refused request, because the texts of routing
        errors name shards.
        """
        if isinstance(error, InvalidFocus):
            home = error.home and runtime.topology().resolve(error.home)
            if home and self.has_shard_permission(request, home):
                return f"{error} They are on {home.alias}."
            return str(error)
        if isinstance(error, NoOpenShard | DanglingShardKey) or self.may_look_everywhere(request):
            return str(error)
        return "a row is on another shard than its key leads to, or relates to one that is."

    def get_queryset(self, request: HttpRequest) -> Any:
        return self.in_scope(request, super().get_queryset(request))

    def in_scope(self, request: HttpRequest, rows: Any) -> Any:
        """Return a queryset of the rows in the scope of the request that the user may see.

        The scope is the shard or shard key that the request names, or the whole shard group.

        :param rows: a queryset of all rows of the model.
        """
        try:
            scope = self.focus(request)
        except InvalidFocus as exc:
            # The URL names a shard or key that does not exist. The changelist has its own page for
            # this error, and reads the scope before it calls this method. So only other pages, such
            # as autocomplete, respond with this 404.
            raise Http404(str(exc)) from exc
        if scope.everywhere and not self.may_look_everywhere(request):
            return rows.none()
        return scope.restrict(rows, partial=self._names_failures(request))

    def _names_failures(self, request: HttpRequest) -> bool:
        """Whether the page may show the rows of some shards although other shards do not answer.

        True for the changelist, which names the shards that do not answer, and for the autocomplete
        view. False for pages of other packages, such as an export. Such a page shows the rows of
        all shards or an error.
        """
        match = request.resolver_match
        is_autocomplete = match is not None and match.url_name == "autocomplete"
        return is_autocomplete or NAMES_FAILURES in request.__dict__

    def get_paginator(self, request: HttpRequest, queryset: Any, *args: Any, **kwargs: Any) -> Any:
        # Order the rows of the autocomplete view by primary key. Django also calls this method for
        # the history, whose rows are of another model, and for the changelist, whose rows are
        # ordered already.
        if getattr(queryset, "model", None) is self.model and not queryset.ordered:
            queryset = queryset.order_by("pk")
        paginator = super().get_paginator(request, queryset, *args, **kwargs)
        match = request.resolver_match
        if match is not None and match.url_name == "autocomplete":
            self._count_or_404(request, paginator)
        return paginator

    def _count_or_404(self, request: HttpRequest, paginator: Any) -> None:
        """Count the rows, and raise ``Http404`` if the shard does not answer.

        A 404 is the only way in which the autocomplete view can report an error.
        """
        home = self.focus(request).home
        if home is None:
            # The page shows all shards. Its query leaves out shards that do not answer, so it does
            # not fail because of them.
            return
        try:
            # The first query of Django's autocomplete view is the count. Run it here, where its
            # failure can be turned into a 404. The paginator keeps the number, so the view does not
            # count again.
            _ = paginator.count
        except DatabaseError as exc:
            if not is_failure(exc):
                raise
            raise Http404(outage_text(home, exc)) from exc

    # -- Permissions -----------------------------------------------------------

    def has_shard_permission(self, request: HttpRequest, shard: Shard) -> bool:
        """Whether the user may look at ``shard`` and change its rows; True unless overridden.

        A user also needs Django's permissions and the permission for the shard group. If this hook
        refuses any shard of the group, the user cannot see the list of the rows of all shards.
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
        if write and is_read_only(self.model):
            return False
        # One page calls this method about sixty times. So look up only once whether the user may
        # access the shard group, and keep the answer on the request.
        groups: dict[str, bool] = request.__dict__.setdefault("_sharded_orm_groups", {})
        group = self.shard_options.group
        if group not in groups:
            groups[group] = may_access(request.user, group)
        if not groups[group]:
            return False
        if row is None:
            return True
        row = unwrap(row)
        if row._state.db is None:
            return True
        shard = runtime.topology().resolve(row._state.db)
        if shard is not None and not self.has_shard_permission(request, shard):
            return False
        # A misplaced row, whose shard key leads to a different shard, can be seen but not written,
        # because save() and delete() refuse it.
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
