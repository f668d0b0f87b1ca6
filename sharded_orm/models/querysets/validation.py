"""Validates foreign keys to sharded models, by looking up the rows to which they refer."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import Field

from sharded_orm.models.querysets.sharded import ShardedQuerySet
from sharded_orm.models.sharding.same_key import key_for_related


def clean_reference(field: Any, row: Any, alias: str | None) -> None:
    """Clean the foreign key ``field`` of ``row``, which refers to a sharded model.

    This does what ``Field.clean()`` does, except that it does not call ``ForeignKey.validate()`` to
    look for the referenced row, for two reasons. Django's method would accept a referenced row with
    a different shard key. And it does not pass the value of the foreign key to the router, which
    needs this value to find the shard if the referenced model is in another group.

    :param alias: the shard of ``row`` if the referenced model is in the same group; None for
        another group.
    """
    value = field.to_python(getattr(row, field.attname))
    Field.validate(field, value, row)
    rows: ShardedQuerySet[Any] = ShardedQuerySet(field.remote_field.model).using(alias)
    key = key_for_related(field.remote_field.model, field, row)
    rows = rows.filter(**{field.remote_field.field_name: value}, **key)
    if not rows.complex_filter(field.get_limit_choices_to()).exists():
        raise does_not_exist(field, value)
    field.run_validators(value)
    setattr(row, field.attname, value)


def does_not_exist(field: Any, value: Any) -> ValidationError:
    """Return the error that Django's ``ForeignKey.validate()`` raises if no row has ``value``."""
    return ValidationError(
        field.error_messages["invalid"],
        code="invalid",
        params={
            "model": field.remote_field.model._meta.verbose_name,
            "pk": value,
            "field": field.remote_field.field_name,
            "value": value,
        },
    )
