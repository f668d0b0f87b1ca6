"""Ids that a visitor submits with a form: of which row of several shards, and of rows that are gone.

Formsets and choice fields of Django find rows by what the browser sends, usually the primary key. Rows
of two shards may have the same one, if each shard counts its ids by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import wraps
from typing import Any

from django.core.exceptions import MultipleObjectsReturned, ValidationError
from django.forms.models import BaseModelFormSet, ModelChoiceField, ModelMultipleChoiceField

from sharded_orm.exceptions import ScatterNotSupported, ShardKeyRequired
from sharded_orm.models.sharding.options import shard_options


def install() -> None:
    """Let Django's formsets and choice fields refuse rows of sharded models that they would mix up."""
    if hasattr(BaseModelFormSet.add_fields, "__wrapped__"):  # the app's ready() has run before
        return
    formsets: Any = BaseModelFormSet
    formsets.add_fields = _add_fields(formsets.add_fields)
    one: Any = ModelChoiceField
    one.to_python = _to_python(one.to_python)
    several: Any = ModelMultipleChoiceField
    several._check_values = _check_values(several._check_values)


def _add_fields(add_fields: Any) -> Any:
    @wraps(add_fields)
    def wrapped(self: Any, form: Any, index: Any) -> None:
        add_fields(self, form, index)
        if shard_options(self.model) is None:
            return
        # The formset has read its rows by now, and no form has been validated.
        if index == 0 and self.initial_form_count():
            _refuse_equal(self.get_queryset(), "pk", "A formset")
        field = form.fields.get(self._pk_field.name)
        if type(field) is ModelChoiceField:
            field.__class__ = _RowOfForm

    return wrapped


class _RowOfForm(ModelChoiceField):  # type: ignore[type-arg]  # the class is generic only in the type stubs
    """The hidden field of a formset that says which row a form is about."""

    def to_python(self, value: Any) -> Any:
        try:
            return super().to_python(value)
        except ShardKeyRequired:
            # A form that is about one of the formset's rows asks the shard of this row. So this row
            # is not, or no longer, among them.
            raise ValidationError(
                self.error_messages["invalid_choice"],
                code="invalid_choice",
                params={"value": value},
            ) from None


def _to_python(to_python: Any) -> Any:
    @wraps(to_python)
    def wrapped(self: Any, value: Any) -> Any:
        try:
            return to_python(self, value)
        except MultipleObjectsReturned:
            name = self.to_field_name or "pk"
            if shard_options(self.queryset.model) is not None:
                chosen = getattr(value, name) if isinstance(value, self.queryset.model) else value
                _refuse_equal(self.queryset.filter(**{name: chosen}), name, "A choice field")
            raise

    return wrapped


def _check_values(check_values: Any) -> Any:
    @wraps(check_values)
    def wrapped(self: Any, value: Any) -> Any:
        rows = check_values(self, value)
        if shard_options(rows.model) is not None:
            _refuse_equal(rows, self.to_field_name or "pk", "A choice field")
        return rows

    return wrapped


def _refuse_equal(rows: Iterable[Any], name: str, what: str) -> None:
    """Raise :exc:`ScatterNotSupported` if rows of two shards have the same value of ``name``."""
    alias_by_value: dict[Any, str] = {}
    for row in rows:
        value, alias = getattr(row, name), row._state.db
        if alias_by_value.setdefault(value, alias) != alias:
            raise ScatterNotSupported(
                f"{what} cannot tell rows of two shards apart: a browser sends {name!r} alone, and"
                f" {type(row).__name__} has rows with {name}={value!r} on {alias_by_value[value]!r} and"
                f" {alias!r}. Remedy: give it rows of one shard, by a condition on the shard key, or"
                " ids that are unique over all shards, as of a TicketField."
            )
