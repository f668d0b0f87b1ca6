"""Relations of sharded models in Django's forms and formsets.

A form of a sharded model reports a row of another shard key that a visitor has chosen for a
many-to-many field, as an error of the field. A formset below a parent gives new rows the parent's
shard key, and offers only rows of that key.

Django has no extension point for this that a model can use: a project defines forms from Django's
own classes, and declares fields of its own in them. So :func:`install` replaces methods of these
classes. For forms of other models they do what Django's methods do.
"""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import Model
from django.forms.models import (
    BaseModelForm,
    BaseModelFormSet,
    ModelChoiceField,
    ModelMultipleChoiceField,
)

from sharded_orm.exceptions import CrossKeyRelation
from sharded_orm.models.sharding.options import (
    ShardOptions,
    colocated_alias,
    group_of,
    options_of,
    shard_options,
)
from sharded_orm.models.sharding.same_key import key_for_related, refuse_two_keys

_form: Any = BaseModelForm
_formset: Any = BaseModelFormSet
_post_clean = _form._post_clean
_add_fields, _get_queryset, _save_new = (
    _formset.add_fields,
    _formset.get_queryset,
    _formset.save_new,
)


def install() -> None:
    """Replace the methods of Django's forms and formsets; call it when the apps are ready."""
    _form._post_clean = _post_clean_with_relations
    _formset.add_fields = _add_fields_with_key
    _formset.get_queryset = _get_queryset_of_key
    _formset.save_new = _save_new_with_key


# -- Forms


def _post_clean_with_relations(form: Any) -> None:
    # In place of BaseModelForm._post_clean(), which validates the row but not its many-to-many
    # fields. The form stores these after the row, by methods that raise CrossKeyRelation, which is
    # for the developer. Here the row has its shard key, whether the form has a field for the key
    # or the caller has set it.
    _post_clean(form)
    options = options_of(form.instance)
    for field in form.instance._meta.many_to_many if options is not None else ():
        name = field.name
        if name in form.fields and _is_saved(form, name) and form.cleaned_data.get(name):
            for other in _unrelatable(options, field, form.instance, form.cleaned_data[name]):
                form.add_error(name, _invalid_choice(form.fields[name], other))


def _is_saved(form: Any, name: str) -> bool:
    """Whether BaseModelForm._save_m2m() stores the field."""
    fields, excluded = form._meta.fields, form._meta.exclude
    return (not fields or name in fields) and (not excluded or name not in excluded)


def _unrelatable(options: ShardOptions | None, field: Any, row: Any, others: Any) -> list[Model]:
    """Return those of ``others`` to which ``row`` cannot be related by the many-to-many ``field``."""
    if options is None or group_of(field.remote_field.model) != options.group:
        return []
    key: Any = options.key
    if key is None or (row.__dict__.get(key.attname) is None and not options.awaits_key(row)):
        return []  # The shard key will be set after the validation, or is reported as missing.
    alias = row._validation_alias()
    unrelatable = []
    for other in others:
        if not isinstance(other, Model):
            continue
        try:
            refuse_two_keys(field, row, other, load=True)
        except CrossKeyRelation:
            unrelatable.append(other)
        else:
            # A row without a shard can be related to no row yet.
            if alias is None or colocated_alias(options, other) != alias:
                unrelatable.append(other)
    return unrelatable


def _invalid_choice(form_field: Any, row: Model) -> ValidationError:
    """Return the error of a form field that does not offer ``row``."""
    code = "invalid_choice"
    messages = {**ModelMultipleChoiceField.default_error_messages, **form_field.error_messages}
    return ValidationError(messages[code], code=code, params={"value": row.pk})


# -- Formsets


def _add_fields_with_key(formset: Any, form: Any, index: int | None) -> None:
    # In place of BaseModelFormSet.add_fields(), which each form of a formset passes through.
    _add_fields(formset, form, index)
    if not (given := _key_of_parent(formset)):
        return
    _give_key(formset, form)
    for key in formset.model._meta.fields:
        if key.attname in given and key.name in form.fields and key is not _relation(formset):
            # A disabled field ignores what is submitted.
            form.fields[key.name].disabled = True
            form.initial[key.name] = given[key.attname]
    _narrow(form)


def _get_queryset_of_key(formset: Any) -> Any:
    # In place of BaseModelFormSet.get_queryset(). BaseInlineFormSet compares the foreign key only;
    # related rows have the shard key of their parent, as those of a related manager.
    if not hasattr(formset, "_queryset") and (key := _key_of_parent(formset)):
        formset.queryset = formset.queryset.filter(**key)
    return _get_queryset(formset)


def _save_new_with_key(formset: Any, form: Any, commit: bool = True) -> Any:
    # In place of BaseModelFormSet.save_new(). A new parent may have got its key after the form was
    # made.
    _give_key(formset, form)
    return _save_new(formset, form, commit=commit)


def _relation(formset: Any) -> Any:
    """Return the foreign key to the parent, or the field for the parent's id in a generic relation;
    None if the formset has no parent.
    """
    return getattr(formset, "fk", None) or getattr(formset, "ct_fk_field", None)


def _key_of_parent(formset: Any) -> dict[str, Any]:
    """Return the shard key of the rows below the parent, as ``{attribute name: value}``.

    Empty if there is no parent, if its key is not known yet, or if the rows may have other keys.
    """
    options, relation = shard_options(formset.model), _relation(formset)
    parent: Any = getattr(formset, "instance", None)
    if options is None or options.key is None or relation is None or parent is None:
        return {}
    key: Any = options.key
    if relation is not key:
        return key_for_related(formset.model, relation, parent)
    value = getattr(parent, key.target_field.attname if key.is_relation else "pk")
    return {} if value is None else {key.attname: value}


def _give_key(formset: Any, form: Any) -> None:
    if form.instance._state.adding:
        for name, value in _key_of_parent(formset).items():
            setattr(form.instance, name, value)


def _narrow(form: Any) -> None:
    """Let the form offer only rows of the shard key of its own row."""
    row = form.instance
    for relation in (*row._meta.fields, *row._meta.many_to_many):
        field = form.fields.get(relation.name) if relation.is_relation else None
        if not isinstance(field, ModelChoiceField):
            continue
        rows: Any = field.queryset
        key = key_for_related(relation.remote_field.model, relation, row)
        # Rows of a slice cannot be filtered; the validation finds those of other keys.
        if key and not rows.query.is_sliced:
            field.queryset = rows.filter(**key)
