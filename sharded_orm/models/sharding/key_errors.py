"""Errors about shard keys and their rows that are raised in several places."""

from __future__ import annotations

from typing import Any

from django.db.models import Model

from sharded_orm.exceptions import ShardKeyChanged, ShardKeyRequired
from sharded_orm.models.sharding.current_shard import unwrapped
from sharded_orm.models.sharding.options import ShardOptions


def describe(instance: Model) -> str:
    """Return a description of ``instance`` for an error message.

    Does not call ``__str__()``, which may send a query.
    """
    # Read the primary key from __dict__. While Model.__init__() runs, it may not be set yet, and if
    # the attribute were read, Django would try to load it.
    row = unwrapped(instance)
    model: Any = type(row)
    values = [row.__dict__.get(field.attname) for field in model._meta.pk_fields]
    return f"{model.__name__}(pk={values[0] if len(values) == 1 else tuple(values)!r})"


def key_of_row_changed(row: Model, name: str, key: Any, new_key: Any) -> ShardKeyChanged:
    """Return the error to raise if a relation would change the shard key of a stored row.

    :param name: the name of the key's field or attribute.
    """
    return ShardKeyChanged(
        f"{describe(row)} has the shard key {name}={key!r} and cannot be given {new_key!r}. The key of"
        " a row never changes: create the row under the new key and delete this one."
    )


def shard_key_required(options: ShardOptions, problem: str, hint: str = "") -> ShardKeyRequired:
    """Return the error for an operation whose shard is unknown. The message lists remedies.

    :param problem: a clause of the message that says what is wrong with the query, such as "the row
        to find or create is on no one shard".
    :param hint: a sentence about another possible cause, with a space before it.
    """
    name = options.model._meta.object_name
    if options.key is None:
        what = f"{name} is an automatic many-to-many table of group {options.group!r}"
        ways = f"filter by an instance of one side ({name}.objects.filter({options.relation_arguments[0]}))"
    else:
        key = options.key.name
        what = f"{name} is sharded by {key!r} in group {options.group!r}"
        ways = f"filter by it ({name}.objects.filter({key}=…))"
    return ShardKeyRequired(
        f"{what}, and {problem}: {ways}, name a shard with .using('{options.group}_00000'), or ask"
        f" every shard on purpose with .scatter().{hint}"
    )
