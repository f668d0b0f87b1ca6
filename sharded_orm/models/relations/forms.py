"""Relations of sharded models in forms: a visitor can choose rows of the row's own shard key only.

Fields of a model make their form fields (``formfield()``), and set the value of a form on the row
(``save_form_data()``). :func:`install_relations_in_forms` overrides both for the relations of a
model, on the fields themselves. Forms, formsets and the admin of Django then need nothing.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import Model
from django.forms.models import (
    InlineForeignKeyField,
    ModelChoiceField,
    ModelMultipleChoiceField,
)

from sharded_orm.exceptions import CrossShardRelation
from sharded_orm.models.sharding.options import options_of
from sharded_orm.models.sharding.same_key import key_for_related, key_of_related, known_key


def install_relations_in_forms(model: type[Model]) -> None:
    """Let forms of ``model`` offer rows of the row's shard key, and report other rows.

    The assignment of a row of another key raises :exc:`CrossShardRelation`, which is for the
    developer.
    """
    field: Any
    for field in (*model._meta.local_fields, *model._meta.local_many_to_many):
        if not (field.many_to_one or field.one_to_one or field.many_to_many):
            continue
        # Attributes of the field, which deconstruct() does not see. If a shard key has one already,
        # that one remains.
        field.__dict__.setdefault("formfield", partial(_formfield, field))
        if not field.many_to_many:
            field.__dict__.setdefault("save_form_data", partial(_save_relation, field))


# -- What a form offers


class RelatedRowsField(ModelChoiceField):  # type: ignore[type-arg]  # generic in the stubs only
    """A mixin for form fields of a relation: in the form of a row, it offers rows of that row's key.

    The rows are those of the field's queryset. All of them are offered if the form does not tell
    the key of its row.
    """

    relation: Any = None

    def get_bound_field(self, form: Any, field_name: str) -> Any:
        # Overrides Field.get_bound_field(), which a form calls before it shows or cleans the field.
        # ``self`` belongs to this form: each form copies its fields.
        rows: Any = self.queryset
        # Rows of a slice cannot be filtered.
        if rows is not None and not rows.query.is_sliced and (key := self._key(form)):
            self.queryset = rows.filter(**key)
        return super().get_bound_field(form, field_name)

    def _key(self, form: Any) -> dict[str, Any]:
        """Return the key of the rows to offer, as ``{attribute name: value}``; empty for any key."""
        row: Any = getattr(form, "instance", None)
        relation = self.relation
        options = None if row is None else options_of(row)
        if options is None or not issubclass(row._meta.concrete_model, relation.model):
            return {}
        value = known_key(options, row)
        if value is None and row._state.adding and relation is not options.key:
            value = _key_of_parent(form, options.key)
            if value is None:
                value = _submitted_key(form, options.key)
        return key_of_related(relation.remote_field.model, relation, options, value)


def _key_of_parent(form: Any, key: Any) -> Any:
    """Return the shard key that the form's row will get from the parent of an inline formset."""
    for name, form_field in form.fields.items():
        if isinstance(form_field, InlineForeignKeyField):
            relation = form.instance._meta.get_field(name)
            keys = key_for_related(type(form.instance), relation, form_field.parent_instance)
            return keys.get(key.attname)
    return None


def _submitted_key(form: Any, key: Any) -> Any:
    """Return the shard key that a visitor has given in the same form; None if it is not valid."""
    if not form.is_bound or key is None or key.name not in form.fields:
        return None
    bound_field = form[key.name]
    try:
        value = bound_field.field.clean(bound_field.data)
        if isinstance(value, Model):
            value = getattr(value, key.target_field.attname)
        return None if value in key.empty_values else key.get_prep_value(key.to_python(value))
    except ValidationError:  # The form reports it.
        return None


@functools.cache
def _with_rows_of_the_key(form_class: type[Any]) -> type[Any]:
    return type(form_class.__name__, (RelatedRowsField, form_class), {})


def _formfield(field: Any, **kwargs: Any) -> Any:
    # Overrides ForeignKey.formfield() and ManyToManyField.formfield().
    default = ModelMultipleChoiceField if field.many_to_many else ModelChoiceField
    form_class = kwargs.get("form_class", default)
    if not issubclass(form_class, ModelChoiceField):
        return type(field).formfield(field, **kwargs)
    kwargs["form_class"] = _with_rows_of_the_key(form_class)
    form_field = type(field).formfield(field, **kwargs)
    form_field.relation = field
    return form_field


# -- What a form sets


def _save_relation(field: Any, row: Any, value: Any) -> None:
    # Overrides Field.save_form_data(), by which a model form sets the value on the row.
    if isinstance(value, Model) and _is_parent_in_formset(field, row, value):
        for name, key in key_for_related(type(row), field, value).items():
            row._state.key_of_parent = (
                key  # clean_key() compares it with a key that a visitor gives.
            )
            if row.__dict__.get(name) is None:
                setattr(row, name, key)
    # Set a row of another shard key by its id: Model.clean_fields() does not find it, and reports
    # that. If the visitor has changed the key of a stored row as well, the other row may have the new
    # key, and be on another shard.
    try:
        type(field).save_form_data(field, row, value)
    except CrossShardRelation:
        setattr(row, field.attname, getattr(value, field.target_field.attname))


def _is_parent_in_formset(field: Any, row: Any, value: Any) -> bool:
    """Whether ``value`` is the parent of an inline formset, and not a choice of the visitor.

    For a new row, ``BaseInlineFormSet._construct_form()`` has set the parent's id. It knows of no key.
    """
    own, parents = row.__dict__.get(field.attname), getattr(value, field.target_field.attname)
    return bool(row._state.adding) and own == parents
