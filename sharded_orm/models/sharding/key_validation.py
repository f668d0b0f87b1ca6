"""Reports a wrong shard key from a visitor as an error of the form field, before anything is saved.

The key of a stored row never changes, and inside ``bound()`` all rows have the bound key. If a row
breaks these rules, ``save()`` raises :exc:`~sharded_orm.exceptions.ShardKeyChanged` or
:exc:`~sharded_orm.exceptions.BoundKeyMismatch`. These exceptions are for the developer. A visitor
should get an error of the form or serializer instead.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import Model
from django.utils.text import capfirst

from sharded_orm import runtime
from sharded_orm.exceptions import ShardKeyRequired
from sharded_orm.models.sharding import row_placement
from sharded_orm.models.sharding.bound_key import key_in_force
from sharded_orm.models.sharding.bound_rows import has_other_key
from sharded_orm.models.sharding.current_shard import current_alias
from sharded_orm.models.sharding.options import ShardOptions, shard_options

KEY_STAYS = (
    "The shard key: it decides on which shard the row is stored, so it never changes. To move the"
    " row, create it under the new key and delete this one."
)


class StoredKeyValidator:
    """A validator for the field of the shard key in serializers of Django REST framework.

    A ``ModelSerializer`` calls the validators of the model's fields before it changes the row.
    Because of ``requires_context``, it passes its own field as the second argument, from which the
    validator finds the row. When Django itself calls the validator, it passes only the value. Then
    the row is unknown, and nothing is checked. Sends a query only if the key was deferred.
    """

    requires_context = True

    def __call__(self, value: Any, serializer_field: Any = None) -> None:
        serializer = getattr(serializer_field, "parent", None)
        # With many=True, ``instance`` is a list of rows. Do not check these rows here: save() of
        # each row checks its key.
        row = getattr(serializer, "instance", None)
        is_stored = isinstance(row, Model) and not row._state.adding
        model = (
            type(row) if is_stored else getattr(getattr(serializer, "Meta", None), "model", None)
        )
        options = shard_options(model) if model is not None else None
        if options is None or options.key is None:
            return
        key: Any = options.key
        if is_stored and _prepared(key, value) != _prepared(key, getattr(row, key.attname)):
            raise _key_stays(key)
        bound_key = key_in_force(options.model)
        if bound_key is not None and _prepared(key, value) != bound_key.value:
            raise _other_key(key)


def install_key_validation(model: type[Model]) -> None:
    """Make forms and serializers of ``model`` report a wrong shard key.

    Does nothing if the key's field is declared by another model, such as a parent in multi-table
    inheritance.
    """
    name = getattr(getattr(model, "ShardMeta", None), "shard_key", None)
    for field in model._meta.local_fields:
        if name in (field.name, field.attname):
            key: Any = field
            # Set the attributes here, and do not pass them as arguments when the field is made.
            # deconstruct() would return arguments, and migrations would contain them.
            if "validators" in vars(key):
                # This field has its own list of validators already, as a CharField does. Copies of
                # the field in other models share this list. So create a new list and do not append
                # to the old one.
                key.validators = [*key.validators, StoredKeyValidator()]
            else:
                # Do not read ``validators`` here, because integer fields use the default database
                # to compute the list.
                key.default_validators = [*key.default_validators, StoredKeyValidator()]
            key.save_form_data = partial(_save_form_data, key)


def clean_key(options: ShardOptions, row: Any) -> None:
    """Check the shard key of ``row``, for ``Model.clean_fields()``.

    Three rules are checked:

    - The key of a stored row must not have changed. If a form has set the key on the row, any
      change is detected, without a query. If the program has assigned the key, a change is detected
      only if the new key is on another shard. This costs one look-up in the directory, unless the
      process remembers the key's shard. (``save()`` refuses all changes.)
    - Inside ``bound()``, the key must be the bound key.
    - In an inline formset, the key must be that of the parent.

    :raises ValidationError: the key is wrong.
    """
    key: Any = options.key
    if key is None:
        return
    is_key_refused = row._state.__dict__.pop("is_key_refused", False)
    key_of_parent = row._state.__dict__.pop("key_of_parent", None)
    if row.__dict__.get(key.attname) is None and not is_key_refused:
        return
    try:
        is_of_other_key = is_key_refused or has_other_key(row)
        if key_of_parent is not None:
            is_of_other_key |= _prepared(key, row.__dict__[key.attname]) != key_of_parent
    except (TypeError, ValueError, ValidationError):
        # The value cannot be a shard key. Raise no error here, because the validation of the key's
        # field reports it.
        return
    if is_of_other_key:
        raise _other_key(key) if row._state.adding else _key_stays(key)
    if not row._state.adding:
        _clean_stored_key(options, row)


def _clean_stored_key(options: ShardOptions, row: Any) -> None:
    key: Any = options.key
    pk, before = row._state.__dict__.get("key_before_form", (None, None))
    try:
        if before is not None and pk == row.pk:
            changed = options.key_of(row) != _prepared(key, before)
        else:
            alias = str(current_alias(options, row))
            if runtime.topology().resolve(alias) is None:
                # The alias is not a shard, but a template schema (from which test shards are
                # cloned), or the database that had the rows before sharding.
                return
            shard = row_placement.locate(options, row)
            changed = shard is None or shard.alias != alias
    except (ShardKeyRequired, TypeError, ValueError, ValidationError):
        # The value cannot be a shard key. Raise no error here, because the validation of the key's
        # field reports it.
        return
    if changed:
        raise _key_stays(key)


def _save_form_data(key: Any, row: Any, value: Any) -> None:
    # Overrides Field.save_form_data() of the shard key's field. A model form calls it to set the
    # key on the row. Inside bound(), do not set a key that differs from the bound key. clean_key()
    # reports the error, and the form is shown once more with this row. If the row had the wrong
    # key, the form would query the rows of that key.
    bound_key = key_in_force(type(row))
    if bound_key is not None:
        prepared = _prepared(key, value)
        row._state.is_key_refused = prepared is not None and prepared != bound_key.value
        if row._state.is_key_refused:
            return
    # Store the row's key before the form changes it, so that clean_key() can compare the old key
    # with the new one. Store the primary key, too. If it is changed later, the instance stands for
    # another row, and clean_key() does not use the stored key.
    if not row._state.adding and row.__dict__.get(key.attname) is not None:
        pk, before = row._state.__dict__.get("key_before_form", (None, None))
        if before is None or pk != row.pk:
            before = row.__dict__[key.attname]
            row._state.key_before_form = (row.pk, before)
        if isinstance(value, Model):
            # Assign only the key. If the key is wrong, an assignment of the instance would raise an
            # exception that the form cannot report.
            new_key = getattr(value, key.target_field.attname)
            setattr(row, key.attname, new_key)
            if new_key != before:
                return
    type(key).save_form_data(key, row, value)


def _prepared(key: Any, value: Any) -> Any:
    if isinstance(value, Model):
        value = getattr(value, key.target_field.attname)
    return key.get_prep_value(value)


def _key_stays(key: Any) -> ValidationError:
    return ValidationError(
        f"{capfirst(key.verbose_name)} cannot be changed. {KEY_STAYS}", code="shard_key_changed"
    )


def _other_key(key: Any) -> ValidationError:
    return ValidationError(
        f"Only rows of one {key.verbose_name} can be saved here, and this is another one.",
        code="other_shard_key",
    )
