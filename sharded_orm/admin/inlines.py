"""Inlines of sharded models: their rows are on the same shard as the row that the page shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin
from django.contrib.admin.checks import InlineModelAdminChecks
from django.contrib.admin.options import InlineModelAdmin
from django.core import checks
from django.core.exceptions import PermissionDenied
from django.forms.models import _get_foreign_key
from django.http import HttpRequest
from django.utils.functional import cached_property

from sharded_orm import runtime
from sharded_orm.admin.base import ShardedBase, options_of
from sharded_orm.admin.forms import InlineFormSetOnShard, with_base, with_fixed_key
from sharded_orm.admin.object_links import site_url, unwrap
from sharded_orm.admin.relation_widgets import PickersMixin
from sharded_orm.admin.shard_scope import ShardScope, scope_of, set_scope
from sharded_orm.backends.write_hooks.followers import is_read_only
from sharded_orm.models.after_migrate.permissions import may_access
from sharded_orm.models.sharding.options import ShardOptions, shard_options
from sharded_orm.topology.model import Shard

if TYPE_CHECKING:
    _Inline = InlineModelAdmin[Any, Any]
    _Tabular = admin.TabularInline[Any, Any]
    _Stacked = admin.StackedInline[Any, Any]
else:
    _Inline, _Tabular, _Stacked = InlineModelAdmin, admin.TabularInline, admin.StackedInline


class ShardedInlineChecks(InlineModelAdminChecks):
    def check(self, inline_obj: Any, **kwargs: Any) -> list[Any]:  # type: ignore[override]  # the same signature as in Django's InlineModelAdminChecks, which differs from that of its base class
        errors = super().check(inline_obj, **kwargs)
        return errors or self._check_shard(inline_obj)

    def _check_shard(self, inline: Any) -> list[Any]:
        options = shard_options(inline.model)
        if options is None:
            problem = f"{inline.model._meta.label} is not a sharded model"
            hint = "Use Django's TabularInline or StackedInline."
        else:
            above = shard_options(inline.parent_model)
            if above is not None and above.group == options.group:
                return []
            if above is None and inline.foreign_key() is options.key:
                return []
            problem = (
                f"rows of {inline.model._meta.label} are not on the shard of their"
                f" {inline.parent_model._meta.label}"
            )
            hint = (
                "An inline needs a parent of the same group, or one of the global database that"
                " is the shard key."
            )
        return [
            checks.Error(f"{problem}.", hint=hint, obj=type(inline), id="sharded_orm.E070"),
        ]


class ShardedInlineMixin(PickersMixin, _Inline):
    """Mixin for inlines of sharded models; combine it with one of Django's inline classes.

    The forms of the inline have no field for the shard key, because a new row gets the key of its
    parent, the row that the page shows. If the parent is in the global database, and not in the
    same shard group, the shard key of the inline's rows is the foreign key to the parent.
    """

    formset: Any = InlineFormSetOnShard
    #: Each formset class of the inline is derived from this class. If a project sets a formset
    #: class that is not, a class derived from both is made.
    formset_on_shard: ClassVar[type[Any]] = InlineFormSetOnShard
    checks_class = ShardedInlineChecks

    @property
    def shard_options(self) -> ShardOptions:
        return options_of(self.model)

    def foreign_key(self) -> Any:
        """Return the foreign key to the parent; None if the relation is a generic one."""
        return _get_foreign_key(self.parent_model, self.model, fk_name=self.fk_name)

    def get_queryset(self, request: HttpRequest) -> Any:
        rows = super().get_queryset(request)
        alias = scope_of(request, self.shard_options).alias
        return rows if alias is None else rows.using(alias)

    def get_exclude(self, request: HttpRequest, obj: Any = None) -> Any:
        excluded = super().get_exclude(request, obj)
        if excluded is None:
            excluded = getattr(getattr(self.form, "_meta", None), "exclude", None)
        return [*(excluded or ()), *self._fields_filled_in(request)]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        filled_in = self._fields_filled_in(request)
        return [field for field in super().get_fields(request, obj) if field not in filled_in]

    def _fields_filled_in(self, request: HttpRequest) -> list[str]:
        """Return the names of the fields that the user does not fill in for a new row.

        These are a generated primary key, and the shard key. If the shard key is the foreign key to
        the parent (the row that the page shows), it is left out, because Django fills it in.
        """
        options, pk = self.shard_options, self.opts.pk
        names = []
        if options.key is not None and options.key is not self.foreign_key():
            names.append(options.key.name)
        if pk.formfield() is None and pk.name not in names:
            # Show no field for a generated primary key. Django's template writes the primary key of
            # a stored row into a hidden input, so the form still receives it.
            names.append(pk.name)
        return names

    def get_formset(self, request: HttpRequest, obj: Any = None, **kwargs: Any) -> Any:
        options = self.shard_options
        kwargs["form"] = with_fixed_key(kwargs.get("form", self.form), options)
        formset_class = kwargs.get("formset", self.formset)
        kwargs["formset"] = with_base(formset_class, self.formset_on_shard)
        home = self._home(request, obj)
        if home is not None and not self.has_shard_permission(request, home):
            # Django's views leave out an inline for which the user has no permission. So this line
            # is reached only if code of the project asks for the formset of such an inline.
            raise PermissionDenied
        if home is None or shard_options(self.parent_model) is not None:
            return super().get_formset(request, obj, **kwargs)
        set_scope(request, ShardScope(options, shard=home, home=home))
        formset: Any = super().get_formset(request, obj, **kwargs)
        formset.home = home
        return formset

    def _home(self, request: HttpRequest, parent: Any) -> Shard | None:
        """Return the shard of the inline's rows that belong to ``parent``; None if that shard is
        not known yet.

        :param parent: the row that the page shows; None on the page for a new row.
        """
        options = self.shard_options
        parent = unwrap(parent)
        if parent is None or shard_options(type(parent)) is not None:
            if parent is not None and parent._state.db is not None:
                return runtime.topology().resolve(parent._state.db)
            above = shard_options(self.parent_model)
            return None if above is None else scope_of(request, above).home
        # The parent is in the global database. The shard key of the inline's rows is then the
        # foreign key to the parent, because the system check E070 reports an inline with any other
        # key.
        foreign: Any = options.key
        key = None if foreign is None else foreign.target_field.attname
        return None if key is None else runtime.locate(options.group, getattr(parent, key))

    def get_view_on_site_url(self, obj: Any = None) -> str | None:
        return site_url(self, obj)

    # -- Permissions -----------------------------------------------------------

    def has_shard_permission(self, request: HttpRequest, shard: Shard) -> bool:
        """Whether the user may look at ``shard`` and change its rows.

        By default, this returns what ``has_shard_permission()`` of the model admin for the inline's
        model returns. If the site has no model admin with this method for that model, return True.
        """
        own = self._own_admin
        return own is None or own.has_shard_permission(request, shard)

    @cached_property
    def _own_admin(self) -> ShardedBase | None:
        if not self.admin_site.is_registered(self.model):
            return None
        own = self.admin_site.get_model_admin(self.model)
        return own if isinstance(own, ShardedBase) else None

    @cached_property
    def _restricts_shards(self) -> bool:
        """Whether ``has_shard_permission()`` is overridden, in the inline or in the model admin of
        its model.

        If it is not overridden, no shard is refused. The permissions can then be checked without
        finding the shard of the rows, which may cost a query.
        """
        if type(self).has_shard_permission is not ShardedInlineMixin.has_shard_permission:
            return True
        own = self._own_admin
        return own is not None and (
            type(own).has_shard_permission is not ShardedBase.has_shard_permission
        )

    def _may_access(
        self, request: HttpRequest, parent: Any, *, write: bool = True, add: bool = False
    ) -> bool:
        if write and is_read_only(self.model):
            return False
        if not may_access(request.user, self.shard_options.group):
            return False
        if not self._restricts_shards:
            return True
        home = self._home(request, parent)
        if home is not None:
            return self.has_shard_permission(request, home)
        # The shard is not known yet, so no rows exist that the user could see. A new row may get to
        # any shard. So the user may add rows only with the permission for all shards.
        shards = runtime.group(self.shard_options.group).shards()
        return not add or all(self.has_shard_permission(request, shard) for shard in shards)

    def has_add_permission(self, request: HttpRequest, obj: Any) -> bool:  # type: ignore[override]  # in Django, too, the method of inlines has one argument more than that of model admins
        return super().has_add_permission(request, obj) and self._may_access(request, obj, add=True)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_view_permission(request, obj) and self._may_access(
            request, obj, write=False
        )

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_change_permission(request, obj) and self._may_access(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_delete_permission(request, obj) and self._may_access(request, obj)


class ShardedTabularInline(ShardedInlineMixin, _Tabular):
    """``TabularInline`` for a sharded model; its rows are on the same shard as the row that the page shows."""


class ShardedStackedInline(ShardedInlineMixin, _Stacked):
    """``StackedInline`` for a sharded model; its rows are on the same shard as the row that the page shows."""
