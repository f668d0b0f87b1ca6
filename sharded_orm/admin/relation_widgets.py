"""Pickers: what a form offers for its relations inside the group is of its own shard."""

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

if TYPE_CHECKING:
    _Admin = BaseModelAdmin[Any]
    _Completing = widgets.AutocompleteMixin

    class _Several(ModelMultipleChoiceField[Any]):
        # Not public, so the stubs leave it out.
        def _check_values(self, value: Any) -> Any: ...
else:
    _Completing = object
    _Several = ModelMultipleChoiceField
    _Admin = BaseModelAdmin


class RawId(widgets.ForeignKeyRawIdWidget):
    """A raw id whose magnifying glass opens the changelist of one shard."""

    #: What its links have to say about the place.
    place: dict[str, str] = {}

    def url_parameters(self) -> dict[str, Any]:
        return {**super().url_parameters(), **self.place}

    def label_and_url_for_value(self, value: Any) -> tuple[str, str]:
        if self.db is None:
            return "", ""
        label, url = super().label_and_url_for_value(value)
        return label, f"{url}?{urlencode(self.place)}" if url else ""


class RawIds(widgets.ManyToManyRawIdWidget):
    """The same for several ids."""

    place: dict[str, str] = {}

    def url_parameters(self) -> dict[str, Any]:
        return {**super().url_parameters(), **self.place}


class _Autocomplete(_Completing):
    place: dict[str, str] = {}

    def get_url(self) -> str:
        return f"{super().get_url()}?{urlencode(self.place)}"

    def optgroups(self, name: str, value: Any, attr: Any = None) -> Any:
        # Overrides AutocompleteMixin's, which looks for all that was sent.
        known = [one for one in value if can_be_related(self.field, one)]
        return super().optgroups(name, known, attr)


class Autocomplete(_Autocomplete, widgets.AutocompleteSelect):
    """Asks one shard."""


class Autocompletes(_Autocomplete, widgets.AutocompleteSelectMultiple):
    """The same for several rows."""


class SeveralRows(_Several):
    """Rows by their ids, of which none is so large that SQLite would fail."""

    def _check_values(self, value: Any) -> Any:
        # Overrides ModelMultipleChoiceField's, which asks for all of them at once.
        rows: Any = self.queryset
        for one in value:
            if stored_value(rows.model._meta.pk, one) is None:
                code = "invalid_pk_value"
                raise ValidationError(self.error_messages[code], code=code, params={"pk": one})
        return super()._check_values(value)


class Wrapper(widgets.RelatedFieldWidgetWrapper):
    """The links beside a picker, to add, change, delete and view related rows of the shard."""

    place: dict[str, str] = {}

    @classmethod
    def like(cls, made: widgets.RelatedFieldWidgetWrapper, place: dict[str, str]) -> Wrapper:
        found = cls.__new__(cls)
        found.__dict__.update(made.__dict__)
        found.place = place
        return found

    def get_context(self, name: str, value: Any, attrs: Any) -> dict[str, Any]:
        context = super().get_context(name, value, attrs)
        for params in ("url_params", "view_related_url_params"):
            if params in context:
                context[params] += f"&{urlencode(self.place)}"
        return context


class PickersMixin(_Admin):
    """Form fields for relations; of a model admin and of an inline alike."""

    def formfield_for_dbfield(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        field: Any = super().formfield_for_dbfield(db_field, request, **kwargs)
        theirs = self._options_in_group(db_field)
        made = getattr(field, "widget", None)
        if theirs is not None and isinstance(made, widgets.RelatedFieldWidgetWrapper):
            scope = self._scope(request)
            place = _place(scope)
            if scope.key is not None and _same_key(scope.options, theirs):
                place = {**place, KEY_VAR: str(scope.key)}
            field.widget = Wrapper.like(made, place)
        return field

    def formfield_for_foreignkey(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        if self._options_in_group(db_field) is None:
            return super().formfield_for_foreignkey(db_field, request, **kwargs)
        return self._picker(super().formfield_for_foreignkey, Autocomplete, RawId, db_field, request, kwargs)  # fmt: skip

    def formfield_for_manytomany(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        if self._options_in_group(db_field) is None:
            return super().formfield_for_manytomany(db_field, request, **kwargs)
        kwargs.setdefault("form_class", SeveralRows)
        return self._picker(super().formfield_for_manytomany, Autocompletes, RawIds, db_field, request, kwargs)  # fmt: skip

    def _picker(
        self,
        make: Any,
        autocomplete: Any,
        raw_id: Any,
        db_field: Any,
        request: HttpRequest,
        kwargs: dict[str, Any],
    ) -> Any:
        scope = self._scope(request)
        kwargs["using"] = scope.alias
        if "widget" not in kwargs:
            # As BaseModelAdmin chooses them.
            if db_field.name in self.get_autocomplete_fields(request):
                kwargs["widget"] = autocomplete(db_field, self.admin_site, using=scope.alias)
            elif db_field.name in self.raw_id_fields:
                rel = db_field.remote_field
                kwargs["widget"] = raw_id(rel, self.admin_site, using=scope.alias)
        if isinstance(kwargs.get("widget"), RawId | RawIds | _Autocomplete):
            kwargs["widget"].place = _place(scope)
        field = make(db_field, request, **kwargs)
        if field is not None:
            # Also of a queryset of the project's own; a template reads it after the view.
            rows = field.queryset
            field.queryset = rows.none() if scope.alias is None else rows.using(scope.alias)
        return field

    def _scope(self, request: HttpRequest) -> ShardScope:
        options = shard_options(self.opts.model)
        assert options is not None
        return scope_of(request, options)

    def _options_in_group(self, db_field: Any) -> ShardOptions | None:
        """The options of the related model, if it is sharded like this one."""
        mine = shard_options(self.opts.model)
        related = getattr(db_field.remote_field, "model", None)
        theirs = None if related is None else shard_options(related)
        if mine is None or theirs is None or theirs.group != mine.group:
            return None
        return theirs


def can_be_related(field: Any, value: Any) -> bool:
    """Whether there can be a related row with this text; a database may fail over another."""
    target = field.related_model._meta.pk if field.many_to_many else field.target_field
    return stored_value(target, value) is not None


def _place(scope: ShardScope) -> dict[str, str]:
    # A key without a shard: its rows are looked for, and there are none.
    return {SHARD_VAR: scope.home.alias} if scope.home is not None else scope.query


def _same_key(one: ShardOptions, other: ShardOptions) -> bool:
    """Whether a value of one model's key means the same as one of the other's."""
    mine: Any = one.key
    theirs: Any = other.key
    if mine is None or theirs is None or other.key_is_generated or one.key_is_generated:
        return False
    if mine.remote_field is not None or theirs.remote_field is not None:
        return mine.related_model is theirs.related_model
    return mine.name == theirs.name and type(mine) is type(theirs)
