"""Relations in forms of sharded models. They offer only rows with the shard key of the form's row.

A model field creates its form field with ``formfield()``. With ``save_form_data()``, it sets on the
row what a visitor has entered. :func:`install_relations_in_forms` overrides both methods on the
relation fields of a model. So Django's forms, formsets and admin need no change.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import Model
from django.forms.models import InlineForeignKeyField, ModelChoiceField

from sharded_orm.exceptions import CrossShardRelation, ShardKeyRequired
from sharded_orm.models.sharding.bound_key import key_in_force
from sharded_orm.models.sharding.options import ShardOptions, options_of
from sharded_orm.models.sharding.same_key import key_for_related, known_key, name_of_related_key


def install_relations_in_forms(model: type[Model]) -> None:
    """Make forms of ``model`` offer and accept only related rows with the form row's shard key.

    Without this, a visitor could choose a row with a different key. Saving the form's row would
    then raise :exc:`CrossShardRelation`, and the visitor would get an error page.
    """
    field: Any
    for field in (*model._meta.local_fields, *model._meta.local_many_to_many):
        if not (field.many_to_one or field.one_to_one or field.many_to_many):
            continue
        # Set the methods on the field object. deconstruct() ignores such attributes, so migrations
        # do not contain them. If the field has such an attribute already, keep it. (The field of a
        # shard key may have one.)
        field.__dict__.setdefault("formfield", partial(_formfield, field))
        if not field.many_to_many:
            field.__dict__.setdefault("save_form_data", partial(_save_relation, field))


# -- What a form offers: related rows with the shard key of the form's row


class RelatedRowsField(ModelChoiceField):  # type: ignore[type-arg]  # the class is generic only in the type stubs
    """A mixin for form fields of a relation, which offers only rows with the form row's shard key.

    The rows come from the field's queryset. If the form does not determine the key of its row, all
    rows of the queryset are offered.
    """

    relation: Any = None

    def get_bound_field(self, form: Any, field_name: str) -> Any:
        # Overrides Field.get_bound_field(), which a form calls before it shows or cleans the field.
        # This method can change ``self``, because each form has its own copy of the field.
        rows: Any = self.queryset
        # If the queryset is a slice, offer all its rows, because a slice cannot be filtered.
        if rows is not None and not rows.query.is_sliced and (key := self._key(form)):
            bound_key = key_in_force(rows.model)
            # If the key of the form's row is not the bound key (set by bound()), offer no rows. A
            # query for the key of the row would raise an error.
            is_refused = bound_key is not None and bound_key.value not in key.values()
            self.queryset = rows.none() if is_refused else rows.filter(**key)
        elif rows is not None and self._is_key_wrong(form) and not _names_shards(rows):
            self.queryset = rows.none()
        return super().get_bound_field(form, field_name)

    def _is_key_wrong(self, form: Any) -> bool:
        """Return whether the visitor has sent no valid shard key for a new row.

        The field can offer only rows with the key of the new row, so it then offers none. The form
        shows an error at the field of the key.
        """
        row: Any = getattr(form, "instance", None)
        options = None if row is None else options_of(row)
        key: Any = None if options is None else options.key
        if key is None or not form.is_bound or not row._state.adding or key.name not in form.fields:
            return False
        return self.relation is not key and _submitted_key(form, key) is None

    def _key(self, form: Any) -> dict[str, Any]:
        """Return the shard key of the rows to offer, such as ``{"owner_id": 7}``.

        Return an empty dict if rows with any key may be offered.
        """
        row: Any = getattr(form, "instance", None)
        relation = self.relation
        options = None if row is None else options_of(row)
        if options is None or not issubclass(row._meta.concrete_model, relation.model):
            return {}
        name = name_of_related_key(relation.remote_field.model, relation, options)
        value = None if name is None else _key_of_row(form, options)
        return {} if name is None or value is None else {name: value}


def _names_shards(rows: Any) -> bool:
    try:
        return bool(rows.db)
    except ShardKeyRequired:
        return False


def _key_of_row(form: Any, options: ShardOptions) -> Any:
    """Return the shard key of the form's row; None if it is unknown.

    For a new row, this is the key that the row will have when it is saved.

    :param options: the options of the row's model, which has a shard key.
    """
    row = form.instance
    if not row._state.adding:
        return known_key(options, row, load=True)
    if (bound_key := key_in_force(type(row))) is not None:
        return bound_key.value
    value = _key_of_parent(form, options.key)
    if value is None:
        value = _submitted_key(form, options.key)
    return known_key(options, row) if value is None else value


def _key_of_parent(form: Any, key: Any) -> Any:
    """Return the shard key that a new row will get from the parent of its inline formset."""
    row = form.instance
    for name, form_field in form.fields.items():
        if isinstance(form_field, InlineForeignKeyField):
            relation = row._meta.get_field(name)
            keys = key_for_related(type(row), relation, form_field.parent_instance, load=True)
            return keys.get(key.attname)
    return None


def _submitted_key(form: Any, key: Any) -> Any:
    """Return the shard key that the visitor has entered into the form's field for the key.

    Return None if there is no value or an invalid one. The result is stored on the form, because
    several relation fields of the form need it, and the check of the value may send a query.
    """
    if not hasattr(form, "_submitted_shard_key"):
        form._submitted_shard_key = _read_submitted_key(form, key)
    return form._submitted_shard_key


def _read_submitted_key(form: Any, key: Any) -> Any:
    form_field = form.fields.get(key.name)
    if form_field is None or not (form.is_bound or form_field.disabled):
        return None
    bound_field = form[key.name]
    try:
        # A visitor cannot change a disabled field. So use its initial value, as the form itself
        # does.
        value = form_field.clean(bound_field.initial if form_field.disabled else bound_field.data)
        if isinstance(value, Model):
            value = getattr(value, key.target_field.attname)
        return None if value in key.empty_values else key.get_prep_value(key.to_python(value))
    except ValidationError:  # The form reports it.
        return None


@functools.cache
def _with_rows_of_the_key(form_class: type[Any]) -> type[Any]:
    if issubclass(form_class, RelatedRowsField):
        return form_class
    return type(form_class.__name__, (RelatedRowsField, form_class), {})


def _formfield(field: Any, **kwargs: Any) -> Any:
    # Overrides ForeignKey.formfield() and ManyToManyField.formfield(). Keep the class of the form
    # field, which Django or the project has chosen, and add the mixin to it. In multi-table
    # inheritance, the form field of the link to the parent is None.
    form_field: Any = type(field).formfield(field, **kwargs)
    form_class: Any = type(form_field)
    if isinstance(form_field, ModelChoiceField):
        form_field.__class__ = _with_rows_of_the_key(form_class)
        form_field.relation = field  # type: ignore[attr-defined]  # an attribute of its new class
    return form_field


# -- What a form sets on its row: the relations that the visitor has chosen


def _save_relation(field: Any, row: Any, value: Any) -> None:
    # Overrides Field.save_form_data(), with which a model form sets a visitor's choice on the row.
    # In an inline formset, it also sets the parent. A new row then also gets the parent's shard
    # key.
    if isinstance(value, Model) and _is_parent_in_formset(field, row, value):
        for name, key in key_for_related(type(row), field, value, load=True).items():
            # Store the parent's key. If a visitor has entered a key, too, clean_key() compares the
            # two.
            row._state.key_of_parent = key
            if row.__dict__.get(name) is None:
                setattr(row, name, key)
    # The assignment raises CrossShardRelation if the chosen row has another shard key than the
    # form's row. Usually, the choice is then an error. But it is valid if the visitor has also
    # entered the chosen row's key as the new key of the form's row, and the form has not set this
    # key yet. So set only the id here. Model.clean_fields(), which runs when the form has set all
    # fields, looks for a row with this id and with the key of the form's row. If there is none, the
    # form shows an error.
    try:
        type(field).save_form_data(field, row, value)
    except CrossShardRelation:
        setattr(row, field.attname, getattr(value, field.target_field.attname))


def _is_parent_in_formset(field: Any, row: Any, value: Any) -> bool:
    """Return whether ``value`` is the parent of an inline formset, and not a choice of the visitor.

    ``BaseInlineFormSet._construct_form()`` sets the parent's id on a new row, but not its shard
    key. So if the row is new and has the id of ``value`` already, ``value`` is the parent.
    """
    own, parents = row.__dict__.get(field.attname), getattr(value, field.target_field.attname)
    return bool(row._state.adding) and own == parents
