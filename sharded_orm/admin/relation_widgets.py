"""Widgets and form fields for relations inside a shard group. They offer only rows of one shard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib.admin import widgets
from django.contrib.admin.options import BaseModelAdmin
from django.core.exceptions import ValidationError
from django.forms import ModelMultipleChoiceField
from django.http import HttpRequest
from django.utils.http import urlencode

from sharded_orm.admin.shard_scope import KEY_VAR, SHARD_VAR, ShardScope, scope_of, stored_value
from sharded_orm.models.sharding.options import ShardOptions, shard_options
from sharded_orm.models.sharding.same_key import needs_same_key

if TYPE_CHECKING:
    _Admin = BaseModelAdmin[Any]
    _Completing = widgets.AutocompleteMixin

    class _Several(ModelMultipleChoiceField[Any]):
        # For the type checker: a private method of Django, which the type stubs leave out.
        def _check_values(self, value: Any) -> Any: ...
else:
    _Completing = object
    _Several = ModelMultipleChoiceField
    _Admin = BaseModelAdmin


class RawId(widgets.ForeignKeyRawIdWidget):
    """An input for the id of a related row, with an icon that opens the list of the rows of one shard."""

    #: URL parameters that the widget adds to its links, so that they lead to lists of one shard or
    #: one shard key.
    scope_query: dict[str, str] = {}

    def url_parameters(self) -> dict[str, Any]:
        return {**super().url_parameters(), **self.scope_query}

    def label_and_url_for_value(self, value: Any) -> tuple[str, str]:
        if self.db is None:
            return "", ""
        label, url = super().label_and_url_for_value(value)
        return label, f"{url}?{urlencode(self.scope_query)}" if url else ""


class RawIds(widgets.ManyToManyRawIdWidget):
    """An input like :class:`RawId`, for the ids of several related rows."""

    scope_query: dict[str, str] = {}

    def url_parameters(self) -> dict[str, Any]:
        return {**super().url_parameters(), **self.scope_query}


class _Autocomplete(_Completing):
    scope_query: dict[str, str] = {}

    def get_url(self) -> str:
        return f"{super().get_url()}?{urlencode(self.scope_query)}"

    def optgroups(self, name: str, value: Any, attr: Any = None) -> Any:
        # Overrides AutocompleteMixin.optgroups(), which reads the rows of all posted values in one
        # query. Leave out values that the column cannot hold, such as a too large number, because
        # the database may raise an error for such a value.
        possible = [text for text in value if can_be_related(self.field, text)]
        return super().optgroups(name, possible, attr)


class Autocomplete(_Autocomplete, widgets.AutocompleteSelect):
    """An autocomplete widget that offers rows of one shard."""


class Autocompletes(_Autocomplete, widgets.AutocompleteSelectMultiple):
    """A widget like :class:`Autocomplete`, for several rows."""


class SeveralRows(_Several):
    """A form field for several related rows. It refuses an id that the column cannot hold, such as
    a too large number, because a query with such an id fails on SQLite.
    """

    def _check_values(self, value: Any) -> Any:
        # Overrides ModelMultipleChoiceField._check_values(), which reads the rows of all ids in one
        # query. That query would fail if the column cannot hold one of the ids. So first check each
        # id by itself.
        rows: Any = self.queryset
        for pk in value:
            if stored_value(rows.model._meta.pk, pk) is None:
                code = "invalid_pk_value"
                raise ValidationError(self.error_messages[code], code=code, params={"pk": pk})
        return super()._check_values(value)


class Wrapper(widgets.RelatedFieldWidgetWrapper):
    """Links next to a widget. With these links, users add, change, delete or view rows of one shard."""

    scope_query: dict[str, str] = {}

    @classmethod
    def like(
        cls, original: widgets.RelatedFieldWidgetWrapper, scope_query: dict[str, str]
    ) -> Wrapper:
        """Return a copy of ``original`` that adds the URL parameters ``scope_query`` to its links."""
        copy = cls.__new__(cls)
        copy.__dict__.update(original.__dict__)
        copy.scope_query = scope_query
        return copy

    def get_context(self, name: str, value: Any, attrs: Any) -> dict[str, Any]:
        context = super().get_context(name, value, attrs)
        for params in ("url_params", "view_related_url_params"):
            if params in context:
                context[params] += f"&{urlencode(self.scope_query)}"
        return context


class PickersMixin(_Admin):
    """Mixin of model admins and inlines: builds form fields for relations inside the shard group."""

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        field: Any = super().formfield_for_dbfield(db_field, request, **kwargs)
        related = self._options_in_group(db_field)
        widget = getattr(field, "widget", None)
        if related is not None and isinstance(widget, widgets.RelatedFieldWidgetWrapper):
            field.widget = Wrapper.like(widget, _scope_query(self._scope(request), related))
        return field

    def formfield_for_foreignkey(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        related = self._options_in_group(db_field)
        if related is None:
            return super().formfield_for_foreignkey(db_field, request, **kwargs)
        return self._picker(super().formfield_for_foreignkey, Autocomplete, RawId, db_field, related, request, kwargs)  # fmt: skip

    def formfield_for_manytomany(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        related = self._options_in_group(db_field)
        if related is None:
            return super().formfield_for_manytomany(db_field, request, **kwargs)
        kwargs.setdefault("form_class", SeveralRows)
        return self._picker(super().formfield_for_manytomany, Autocompletes, RawIds, db_field, related, request, kwargs)  # fmt: skip

    def _picker(
        self,
        make: Any,
        autocomplete: Any,
        raw_id: Any,
        db_field: Any,
        related: ShardOptions,
        request: HttpRequest,
        kwargs: dict[str, Any],
    ) -> Any:
        scope = self._scope(request)
        kwargs["using"] = scope.alias
        if "widget" not in kwargs:
            # If a field is in both autocomplete_fields and raw_id_fields, autocomplete wins, as in
            # BaseModelAdmin.
            if db_field.name in self.get_autocomplete_fields(request):
                kwargs["widget"] = autocomplete(db_field, self.admin_site, using=scope.alias)
            elif db_field.name in self.raw_id_fields:
                rel = db_field.remote_field
                kwargs["widget"] = raw_id(rel, self.admin_site, using=scope.alias)
        if isinstance(kwargs.get("widget"), RawId | RawIds | _Autocomplete):
            kwargs["widget"].scope_query = _scope_query(scope, related)
        field = make(db_field, request, **kwargs)
        if field is not None:
            # Bind the choices to the shard by using(). The template reads the choices only after
            # the view has returned. The view's default shard no longer applies at that time, so a
            # query without using() would be refused.
            rows = field.queryset
            rows = rows.none() if scope.alias is None else rows.using(scope.alias)
            if related.key is not None and (key := _shared_key(scope, related)) is not None:
                rows = rows.filter(**{related.key.attname: key})
            field.queryset = rows
        return field

    def _scope(self, request: HttpRequest) -> ShardScope:
        options = shard_options(self.opts.model)
        assert options is not None
        return scope_of(request, options)

    def _options_in_group(self, db_field: Any) -> ShardOptions | None:
        """Return the shard options of the model to which ``db_field`` refers; None if that model is
        outside this model's shard group.
        """
        own = shard_options(self.opts.model)
        model = getattr(db_field.remote_field, "model", None)
        related = None if model is None else shard_options(model)
        if own is None or related is None or related.group != own.group:
            return None
        return related


def can_be_related(field: Any, value: Any) -> bool:
    """Whether the column to which the relation ``field`` refers can hold ``value``.

    The answer is False, for example, for a number that is too large. A query that compares the
    column with such a value may make the database raise an error.
    """
    target = field.related_model._meta.pk if field.many_to_many else field.target_field
    return stored_value(target, value) is not None


def _scope_query(scope: ShardScope, related: ShardOptions) -> dict[str, str]:
    """Return the URL parameters with which a link to a list of related rows shows only rows of
    ``scope``.
    """
    # Name the shard of the scope. If the scope is a shard key that has no shard yet, name the key.
    # The linked list is then empty, because no row can have this key yet. If the scope is the whole
    # group, name nothing.
    query = {SHARD_VAR: scope.home.alias} if scope.home is not None else scope.query
    key = _shared_key(scope, related)
    return query if key is None else {**query, KEY_VAR: str(key)}


def _shared_key(scope: ShardScope, related: ShardOptions) -> Any:
    """Return the shard key of the page's row, if rows of the related model must have the same key.

    Return None if they may have other keys, or if the key of the page's row is not known.
    """
    return scope.key if needs_same_key(scope.options, related) else None
