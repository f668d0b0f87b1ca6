"""Refuses an upsert under a bound key if it may change rows that do not have this key.

The bound key is the shard key that a ``with bound()`` block or a request sets for all its queries.
An upsert is ``bulk_create(update_conflicts=True)``. If a new row and a stored row have the same
values in the fields of a unique constraint, the database updates the stored row, even if that row
has another shard key. A query before the insert cannot exclude this, because another transaction
may store such a row later.

So each unique constraint must contain a field in which no stored row of another key can equal the
new row. This is the shard key, or a field in which the new row has NULL or gets a new id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from django.db.models import F, Field, Model, UniqueConstraint

from sharded_orm.exceptions import BoundKeyMismatch
from sharded_orm.models.fields.tickets import TicketField
from sharded_orm.models.sharding.bound_key import BoundKey
from sharded_orm.models.sharding.key_errors import describe
from sharded_orm.models.sharding.options import ShardOptions

# If a field has one of these pre_save() methods, and is None in a new row, the row gets NULL or a
# new id in this field. Then no stored row equals the new row in this field.
_OF_NO_ROW = frozenset({Field.pre_save, TicketField.pre_save})


def refuse_upserts_without_key(
    options: ShardOptions, key: BoundKey, objs: Sequence[Model], unique_fields: Iterable[str] | None
) -> None:
    """Raise :exc:`BoundKeyMismatch` if an upsert of ``objs`` might change a row of a different key.

    Sends no query.

    :param options: the options of the rows' model.
    :param key: the bound key, which ``bound()`` has set; ``objs`` have this key.
    :param unique_fields: the argument of ``bulk_create()``. None on databases that ignore it and
        always use all unique constraints to find conflicts.
    """
    for names in _constraints(options.model, unique_fields):
        fields = _fields(options.model, names)
        if any(_holds_key(options, field) for field in fields):
            continue
        for obj in objs:
            if not any(_is_of_no_row(field, obj) for field in fields):
                raise BoundKeyMismatch(
                    f"bulk_create(update_conflicts=True) may change a row of another key by"
                    f" {describe(obj)}: its unique constraint on {[str(name) for name in names]!r} does"
                    f" not contain the shard key, and {key} is in force. Leave out these values, name a"
                    " constraint with the key in unique_fields (not on MySQL and MariaDB), or use"
                    " update_or_create(). If rows of other keys may be changed, leave the key with"
                    " sharded_orm.unbound()."
                )


def _constraints(model: Any, unique_fields: Iterable[str] | None) -> list[list[Any]]:
    """Return the fields and expressions of each constraint by which an upsert may find a conflict."""
    if unique_fields:
        return [list(unique_fields)]
    meta = model._meta
    constraints: list[list[Any]] = [[field.name for field in meta.pk_fields]]
    constraints += [
        [field.name]
        for field in meta.local_concrete_fields
        if field.unique and not field.primary_key
    ]
    constraints += map(list, meta.unique_together)
    # Without ``unique_fields``, the database is MySQL or MariaDB. They do not support constraints
    # with a condition, and Django does not create them there. So skip these constraints.
    constraints += [
        [*constraint.fields, *constraint.expressions]
        for constraint in meta.constraints
        if isinstance(constraint, UniqueConstraint) and constraint.condition is None
    ]
    return constraints


def _fields(model: Any, names: Iterable[Any]) -> list[Any]:
    """Return the fields in ``names``, which contains names of fields and expressions.

    ``F("name")`` counts as the name of a field. Other expressions, such as ``Lower("name")``, are
    skipped.
    """
    meta = model._meta
    fields: list[Any] = []
    for name in names:
        plain = getattr(name, "name", None) if isinstance(name, F) else name
        if isinstance(plain, str):
            fields += meta.pk_fields if plain == "pk" else [meta.get_field(plain)]
    return fields


def _holds_key(options: ShardOptions, field: Any) -> bool:
    if options.key is None:
        # An automatic many-to-many table has no field for the shard key. Its rows have the key of
        # the two rows that they relate, and each foreign key to one of these determines the key.
        # (An earlier check has made sure that both related rows have the same key.)
        return bool(field.is_relation)
    return bool(field.attname == options.key.attname)


def _is_of_no_row(field: Any, obj: Any) -> bool:
    """Return whether ``obj`` gets NULL or a new id in ``field``.

    Then no stored row equals the new row in this field.
    """
    if field.generated or type(field).pre_save not in _OF_NO_ROW:
        return False
    if field.is_relation and field.get_cached_value(obj, default=None) is not None:
        # The foreign key may be empty now. But when the row is saved, Django copies the id of the
        # related instance into it.
        return False
    return getattr(obj, field.attname) is None and field.get_prep_value(None) is None
